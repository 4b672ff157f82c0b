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

from doublehorizon.agent import AgentState
from doublehorizon.api import DHMBPO
from doublehorizon.cache import use_compilation_cache
from doublehorizon.config import Config
from doublehorizon.devices import using
from doublehorizon.errors import UserError
from doublehorizon.progress import Progress
from doublehorizon.replay import Replay
from doublehorizon.types import Task, Transition
from doublehorizon.updates import Setting


@dataclass(frozen=True)
class Subject:
    """One seed of a run. Arrays have no seed axis."""

    config: Config
    task: Task
    seed: int
    num_rows: int
    state: AgentState
    replay: Replay

    @property
    def setting(self) -> Setting:
        """Its model, in which nothing changes any more."""
        return Setting(self.config, self.task, self.state.world.as_multiplied())

    def drawn(self, count: int, key: PRNGKeyArray) -> Transition:
        """Transitions of the replay, drawn without replacement while there are enough."""
        at = jr.choice(key, self.num_rows, (count,), replace=count > self.num_rows)
        return jax.tree.map(lambda x: x[at], self.replay.rows)

    def starts(self, count: int, key: PRNGKeyArray) -> Float[Array, "count obs"]:
        """States from which training rollouts begin: those that the last distribution rollouts came to; of the replay
        in a run without them."""
        ring = self.state.ring
        if ring is None or int(ring.size) == 0:
            return self.drawn(count, key).obs
        at = jr.choice(key, int(ring.size), (count,), replace=count > int(ring.size))
        return (ring.rows.obs if isinstance(ring.rows, Transition) else ring.rows)[at]


@contextmanager
def opened(
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


def subjects(model: DHMBPO, seeds: tuple[int, ...] = ()) -> list[Subject]:
    """Each chosen seed of a run; all of them by default."""
    progress = model.progress
    if progress is None:
        raise UserError("nothing was learnt yet.")
    unknown = [seed for seed in seeds if seed not in progress.seeds]
    if unknown:
        raise UserError(f"the run has no seed {unknown[0]}. Its seeds: {', '.join(map(str, progress.seeds))}.")
    return [_subject(progress, progress.seeds.index(seed)) for seed in seeds or progress.seeds]


def _subject(progress: Progress, k: int) -> Subject:
    alone = jax.tree.map(lambda x: x[k], (progress.state, progress.replay))
    state, replay = jax.device_put(alone, progress.devices[0])
    return Subject(progress.config, progress.task, progress.seeds[k], progress.num_rows, state, replay)


def require_model(subject: Subject, what: str) -> None:
    """Some questions are about the model."""
    if not subject.config.has_model:
        raise UserError(f"{what} needs a model, but this run was trained without one (preset sac).")


def as_rows(x: Float[Array, "n ..."], times: int) -> Float[Array, "rows ..."]:
    """Each row so many times, one after the other."""
    return jnp.repeat(x, times, axis=0)
