"""Recognises a seed that has diverged: numbers that are no longer finite, or have left all bounds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from doublehorizon.algorithm.agent import AgentState
from doublehorizon.algorithm.devices import fetch, over_seeds, program
from doublehorizon.algorithm.model_buffer import ModelBuffer
from doublehorizon.algorithm.replay_buffer import ReplayBuffer
from doublehorizon.algorithm.start_states import as_transitions
from doublehorizon.algorithm.values import quantile

_MOST_PARAMETER = 1e6  # weights of a healthy network are below a hundred
_MOST_TIMES_REAL = 1e4  # an imagined world may be wrong, but not by this factor
_SMALLEST_RANGE = 1e-4  # of an observation that never changes, as in normalizer.py
_TIMES_USUAL = 1e3  # as far from the median as nine of ten rows: no stored row is unless something has failed
_LEAST_REWARD = 10.0  # the same of rewards: a rare one of a thousand is what a task may be about
_LEAST_USUAL = 0.1  # that distance for a number that hardly ever changes, relative to the median where that is large


class Signs(NamedTuple):
    """Signs of divergence per seed; each is NaN if any number that goes into it is."""

    parameter: Float[Array, "*seed"]
    """The largest parameter of all networks."""
    observation: Float[Array, "*seed"]
    """How far imagined observations lie from the mean, by the farthest real one."""
    value: Float[Array, "*seed"]
    """The largest imagined reward per step, by the largest real one."""


_MAY_BE_UNKNOWN = ("termination/", "model/validation", "model/member")
"""There may have been no end at all, and no steps after the last fit."""

_MEANINGS = (
    ("the largest parameter is {}", _MOST_PARAMETER),
    ("imagined observations are up to {} times as far from the mean as real ones", _MOST_TIMES_REAL),
    ("imagined rewards are up to {} times as large as real ones", _MOST_TIMES_REAL),
)


def signs_of_divergence(
    discount: float, num_rows: int, replay: ReplayBuffer, state: AgentState, metrics: dict[str, np.ndarray]
) -> list[str]:
    """One line per seed: what shows that it has diverged, or nothing."""
    found = fetch(measure(discount, jnp.asarray(num_rows, jnp.int32), replay, state))
    lines = []
    for k in range(len(found.parameter)):
        # written so that what is not a number is a sign too
        signs = [
            meaning.format(f"{value[k]:.3g}")
            for (meaning, most), value in zip(_MEANINGS, found, strict=True)
            if not value[k] <= most
        ]
        signs += [
            f"{name} is {value[k]:.3g}"
            for name, value in sorted(metrics.items())
            if not name.startswith(_MAY_BE_UNKNOWN) and not np.isfinite(value[k])
        ]
        lines.append("; ".join(signs))
    return lines


@program(donate="none")
def measure(discount: float, num_rows: Int[Array, ""], replay: ReplayBuffer, state: AgentState) -> Signs:
    """The signs of every seed. Arrays have a leading seed axis."""
    return over_seeds(jax.vmap(lambda *seed: _signs(discount, num_rows, *seed)), replay, state)


def _signs(discount: float, num_rows: Int[Array, ""], replay: ReplayBuffer, state: AgentState) -> Signs:
    actor_critic, bounds = state.actor_critic, state.actor_critic.bounds
    ends = None if state.world.termination_model is None else state.world.termination_model.members
    networks = (state.world.members, ends, actor_critic.actor, actor_critic.critics, actor_critic.target_critics)
    parameters = jax.tree.leaves((networks, actor_critic.log_temperature))
    mean, used = state.world.obs_normalizer.mean[None], jnp.arange(replay.rows.reward.shape[0]) < num_rows
    # where steps led to, too: what is seen only when an episode ends is in no other observation
    seen = jnp.maximum(jnp.abs(replay.rows.obs - mean), jnp.abs(replay.rows.next_obs - mean))
    real = jnp.max(jnp.where(used[:, None], seen, 0.0), axis=0)
    imagined = jnp.zeros_like(real) if state.model_buffer is None else _farthest(state.model_buffer, mean)
    reward = jnp.max(jnp.where(used, jnp.abs(replay.rows.reward), 0.0))
    return Signs(
        parameter=jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in parameters if x.size > 0])),
        observation=jnp.max(imagined / jnp.maximum(real, _SMALLEST_RANGE)),
        value=jnp.maximum(jnp.abs(bounds.low), jnp.abs(bounds.high)) * (1.0 - discount) / jnp.maximum(reward, 1.0),
    )


@program(donate="none")
def far_rows(
    num_rows: Int[Array, ""], replay: ReplayBuffer
) -> tuple[Bool[Array, "seed rows"], Int[Array, "seed rows"]]:
    """Whether a stored row has a number that lies a thousand times as far from the median as nine of ten do, and which
    one: those of an observation, the reward, those of the next observation. A sensor that failed for one step leaves
    such rows. Rewards of terminating steps do not count."""
    return over_seeds(jax.vmap(lambda replay: _far_rows(num_rows, replay)), replay)


def _far_rows(num_rows: Int[Array, ""], replay: ReplayBuffer) -> tuple[Bool[Array, " rows"], Int[Array, " rows"]]:
    rows, used = replay.rows, jnp.arange(replay.rows.reward.shape[0]) < num_rows

    def far(
        x: Float[Array, " rows"], counted: Bool[Array, " rows"], least: float = _LEAST_USUAL
    ) -> Bool[Array, " rows"]:
        median = quantile(x, counted, 0.5)
        off = jnp.abs(x - median)
        usual = jnp.maximum(quantile(off, counted, 0.9), least * jnp.maximum(jnp.abs(median), 1.0))
        return counted & (off > _TIMES_USUAL * usual)

    obs, next_obs = (jax.vmap(lambda x: far(x, used), in_axes=1, out_axes=1)(x) for x in (rows.obs, rows.next_obs))
    reward = far(rows.reward, used & (rows.terminated == 0), _LEAST_REWARD)
    flags = jnp.concatenate([obs, reward[:, None], next_obs], axis=1)
    return jnp.any(flags, axis=1), jnp.argmax(flags, axis=1)


def _farthest(buffer: ModelBuffer, mean: Float[Array, "1 obs"]) -> Float[Array, " obs"]:
    """How far from the mean imagined observations lie: states that were visited, or where stored steps led."""
    steps = as_transitions(buffer.rows)
    obs = buffer.rows.obs if steps is None else steps.next_obs
    visited = jnp.arange(obs.shape[0]) < buffer.size
    return jnp.max(jnp.where(visited[:, None], jnp.abs(obs - mean), 0.0), axis=0)


@program(donate="none")
def select_seeds(flags: Bool[Array, " seed"], first: AgentState, second: AgentState) -> AgentState:
    """Each seed's state from the first record where its flag is set, else from the second."""

    def one_seed(flag: Bool[Array, ""], first: AgentState, second: AgentState) -> AgentState:
        return jax.tree.map(lambda x, y: jnp.where(flag, x, y), first, second)

    return over_seeds(jax.vmap(one_seed), flags, first, second)
