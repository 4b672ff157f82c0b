"""A saved run as analyses take it: its config, its task, and each seed's networks and replay."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from doublehorizon.algorithm.agent import AgentState
from doublehorizon.algorithm.devices import use_compilation_cache, using
from doublehorizon.algorithm.replay_buffer import ReplayBuffer
from doublehorizon.algorithm.types import Task, Transition
from doublehorizon.algorithm.updates import UpdateContext
from doublehorizon.api import DHMBPO
from doublehorizon.config import Config
from doublehorizon.errors import UserError
from doublehorizon.run.progress import Progress


@dataclass(frozen=True)
class LoadedSeed:
    """One seed of a run. Arrays have no seed axis."""

    config: Config
    task: Task
    seed: int
    num_rows: int
    state: AgentState
    replay: ReplayBuffer
    first_effort: float
    """Factor on the work of its run's first fit."""

    @property
    def context(self) -> UpdateContext:
        """Its model, in which nothing changes any more."""
        return UpdateContext(self.config, self.task, self.state.world.in_storage_dtype())

    def drawn(self, count: int, key: PRNGKeyArray) -> Transition:
        """Transitions of the replay, drawn without replacement while there are enough."""
        at = jr.choice(key, self.num_rows, (count,), replace=count > self.num_rows)
        return jax.tree.map(lambda x: x[at], self.replay.rows)

    def starts(self, count: int, key: PRNGKeyArray) -> Float[Array, "count obs"]:
        """States from which training rollouts begin: those that the last distribution rollouts came to, and, in the
        share that the config says, of the replay; in a run without distribution rollouts all of the replay."""
        buffer = self.state.model_buffer
        size = 0 if buffer is None else int(buffer.size)
        if buffer is None or size == 0:
            return self.drawn(count, key).obs
        num_real = round(self.config.policy.replay_start_share * count)
        key_real, key_imagined, key_order = jr.split(key, 3)
        at = jr.choice(key_imagined, size, (count - num_real,), replace=count - num_real > size)
        found = jnp.concatenate([self.drawn(num_real, key_real).obs, buffer.rows.obs[at]])
        return jr.permutation(key_order, found)


@contextmanager
def open_run(
    run: Path, device: str | None, needed: dict[str, Any] | None = None, step: int | None = None
) -> Iterator[DHMBPO]:
    """A run's agent that has learnt something, on its device; as it is now, or was at a step. `needed` are functions of
    a user's own, as `DHMBPO.load` takes them."""
    use_compilation_cache()
    model = DHMBPO.load(run, device=device, step=step, **(needed or {}))
    with using(model.devices[:1]):
        if model.progress is None or model.progress.policies is None:
            raise UserError(f"{run} has not learnt a policy yet: train it for more steps first.")
        yield model


def loaded_seeds(model: DHMBPO, seeds: tuple[int, ...] = ()) -> list[LoadedSeed]:
    """Each chosen seed of a run; all of them by default."""
    progress = model.progress
    if progress is None:
        raise UserError("nothing was learnt yet.")
    unknown = [seed for seed in seeds if seed not in progress.seeds]
    if unknown:
        raise UserError(f"the run has no seed {unknown[0]}. Its seeds: {', '.join(map(str, progress.seeds))}.")
    return [_loaded_seed(progress, progress.seeds.index(seed)) for seed in seeds or progress.seeds]


def _loaded_seed(progress: Progress, k: int) -> LoadedSeed:
    alone = jax.tree.map(lambda x: x[k], (progress.agent, progress.replay))
    state, replay = jax.device_put(alone, progress.setup.devices[0])
    effort = progress.setup.first_effort
    return LoadedSeed(progress.config, progress.task, progress.seeds[k], progress.num_rows, state, replay, effort)


def require_model(loaded: LoadedSeed, what: str) -> None:
    """Some questions are about the model."""
    if not loaded.config.has_model:
        raise UserError(f"{what} needs a model, but this run was trained without one (preset sac).")


def as_rows(x: Float[Array, "n ..."], times: int) -> Float[Array, "rows ..."]:
    """Each row `times` times, one after the other."""
    return jnp.repeat(x, times, axis=0)
