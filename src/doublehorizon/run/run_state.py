"""What a checkpoint holds of a run, as one record, and the record as files.

A new field of a run's state is added here and nowhere else: to `RunState`, to `encode` and to `decode`.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from doublehorizon.acting.env_runner import Batch, Episode, RunnerId
from doublehorizon.acting.policy import NumpyPolicy, from_arrays
from doublehorizon.algorithm.agent import AgentState
from doublehorizon.envs.make import EnvSpec, Termination


@dataclass(frozen=True)
class PendingEvaluation:
    """A test that has been started: with which policies (None: as in the random steps), and when, in seconds."""

    policies: list[NumpyPolicy] | None
    seconds: float


class LeftOut(NamedTuple):
    """A row of a seed's replay, and the row whose copy replaces it, by how many were stored before each."""

    seed: int
    row: int
    copy_of: int


@dataclass(frozen=True)
class RunState:
    """All that changes while a run learns, but for the rows of its replay.

    Nothing in it is ever changed in place: a reference is a snapshot, and going back is an assignment. Arrays have a
    leading seed axis.
    """

    agent: AgentState
    termination: Termination
    """How the model knows when episodes end; a rule that was found wrong is learnt from then on."""
    cut_after: int | None = None
    """Agent steps after which the environment cuts episodes off by itself, before the time limit; None: not seen."""
    goal: int = 0
    """Simulator steps to which the run was asked to go."""
    iteration: int = 0
    begun: int = 0
    """Agent steps of an iteration that is not complete yet, but whose transitions are stored; 0 in a checkpoint."""
    seconds: float = 0.0
    policies: list[NumpyPolicy] | None = None
    """Each seed's policy after the last whole iteration, on the host; None before the first fit."""
    returns: dict[int, dict[int, float]] = field(default_factory=dict)
    """Test return by step and seed, of all tests that are done."""
    last_spreads: dict[int, float] = field(default_factory=dict)
    """Standard deviation of each seed's episodes in the last test that is done; empty where it had one episode."""
    pending: dict[int, PendingEvaluation] = field(default_factory=dict)
    """Tests by the step at which they were started."""
    episodes: dict[RunnerId, Episode] = field(default_factory=dict)
    """Those that were running when the last steps were collected."""
    ahead: Batch | None = None
    """Steps of a single environment that were made already and belong to the next iteration, `[seed, step, ...]`."""
    left_out: tuple["LeftOut", ...] = ()
    """Rows of replays that a seed diverged on, in order; a copy of another row stands in the place of each."""
    log_sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each log that belong to what was done so far."""


def encode(state: RunState) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """As JSON and as arrays by name. `decode` is the inverse."""
    about = {
        "goal": state.goal,
        "cut_after": state.cut_after,
        "iteration": state.iteration,
        "seconds": state.seconds,
        "learnt": state.policies is not None,
        "returns": {str(step): {str(k): v for k, v in row.items()} for step, row in state.returns.items()},
        "spreads": {str(seed): value for seed, value in state.last_spreads.items()},
        "pending": {
            str(step): {"seconds": test.seconds, "learnt": test.policies is not None}
            for step, test in state.pending.items()
        },
        "episodes": [[*at, episode.reset_seed, episode.is_random] for at, episode in state.episodes.items()],
        "left_out": [list(entry) for entry in state.left_out],
        "logs": state.log_sizes,
    }
    plain = jax.device_get([_plain(leaf) for leaf in jax.tree.leaves(state.agent)])
    arrays = {f"agent{name}": x for name, x in zip(_leaf_names(state.agent), plain, strict=True)}
    for (seed, env_index), episode in state.episodes.items():
        place = f"episode/{seed}/{env_index}"
        arrays |= {
            f"{place}/first": episode.first_obs,
            f"{place}/actions": episode.actions,
            f"{place}/obs": episode.obs,
        }
    arrays |= {f"ahead/{name}": rows for name, rows in (state.ahead or {}).items()}
    for step, test in state.pending.items():
        for k, policy in enumerate(test.policies or []):
            arrays |= {f"pending/{step}/{k}/{name}": x for name, x in policy.arrays().items()}
    return about, {name: np.ascontiguousarray(x) for name, x in arrays.items()}


def decode(about: dict[str, Any], arrays: dict[str, np.ndarray], shapes: AgentState, spec: EnvSpec) -> RunState:
    """The record whose agent has these shapes, its arrays and keys on the host. The policies of an agent that has
    learnt are its actors, which are not stored twice: they are still missing."""
    num_seeds = jax.tree.leaves(shapes)[0].shape[0]
    return RunState(
        agent=_agent(shapes, arrays),
        termination=spec.termination,
        cut_after=about.get("cut_after"),
        goal=int(about["goal"]),
        iteration=int(about["iteration"]),
        seconds=float(about["seconds"]),
        returns={int(step): {int(k): float(v) for k, v in row.items()} for step, row in about["returns"].items()},
        last_spreads={int(seed): float(value) for seed, value in about.get("spreads", {}).items()},
        pending={int(step): _pending(arrays, num_seeds, step, test) for step, test in about["pending"].items()},
        episodes=dict(_episode(arrays, spec, *entry) for entry in about["episodes"]),
        ahead=_ahead(arrays, num_seeds, spec),
        left_out=tuple(LeftOut(*map(int, entry)) for entry in about.get("left_out", ())),
        log_sizes={str(name): int(size) for name, size in about["logs"].items()},
    )


def _leaf_names(tree: Any) -> list[str]:
    """Names of a record's arrays, in the order of its leaves."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.flatten_with_path(tree)[0]]


def _plain(leaf: jax.Array) -> jax.Array:
    return jr.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _agent(shapes: AgentState, arrays: dict[str, np.ndarray]) -> AgentState:
    leaves, structure = jax.tree.flatten(shapes)
    found = []
    for name, leaf in zip(_leaf_names(shapes), leaves, strict=True):
        stored = arrays[f"agent{name}"]
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        data = jax.eval_shape(jr.key_data, leaf) if is_key else leaf
        if stored.shape != data.shape or stored.dtype != data.dtype:
            raise ValueError(f"{name} is {stored.dtype}{stored.shape}, not {data.dtype}{data.shape}")
        found.append(jr.wrap_key_data(jnp.asarray(stored)) if is_key else stored)
    return jax.tree.unflatten(structure, found)


def _pending(arrays: dict[str, np.ndarray], num_seeds: int, step: str, test: dict[str, Any]) -> PendingEvaluation:
    def policy(k: int) -> NumpyPolicy:
        prefix = f"pending/{step}/{k}/"
        return from_arrays({name[len(prefix) :]: x for name, x in arrays.items() if name.startswith(prefix)})

    policies = [policy(k) for k in range(num_seeds)] if test["learnt"] else None
    return PendingEvaluation(policies, float(test["seconds"]))


def _ahead(arrays: dict[str, np.ndarray], num_seeds: int, spec: EnvSpec) -> Batch | None:
    found = {name.removeprefix("ahead/"): x for name, x in arrays.items() if name.startswith("ahead/")}
    if not found:
        return None
    sizes = {"obs": (spec.obs_size,), "act": (spec.act_size,), "next_obs": (spec.obs_size,)}
    count = found["reward"].shape[1]
    for name in ("obs", "act", "reward", "next_obs", "terminated"):
        if found[name].shape != (num_seeds, count, *sizes.get(name, ())):
            raise ValueError(f"{name} of the steps made ahead is {found[name].shape}")
    return found


def _episode(
    arrays: dict[str, np.ndarray], spec: EnvSpec, seed: int, env_index: int, reset_seed: int, is_random: bool = False
) -> tuple[RunnerId, Episode]:
    first, actions, obs = (arrays[f"episode/{seed}/{env_index}/{part}"] for part in ("first", "actions", "obs"))
    sizes = (spec.obs_size,)
    if actions.ndim != 2 or actions.shape[1] != spec.act_size or obs.shape != sizes or first.shape != sizes:
        raise ValueError(f"the episode of seed {seed} has actions {actions.shape} and ends in {obs.shape}")
    return (int(seed), int(env_index)), Episode(int(reset_seed), first, actions, obs, bool(is_random))
