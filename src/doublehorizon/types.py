"""Records that travel between the rooms, and the names of their axes.

Axis glossary (time before batch, ensemble before both; a leading `seed` axis is added by `vmap` at the border):

    obs, act      size of an observation, of an action
    target        size of what the model predicts: reward and change of the observation, 1 + obs
    batch         imagined trajectories side by side
    rows          stored transitions
    horizon       steps of a rollout
    states        states of a rollout: horizon + 1
    member        networks of the model's ensemble
    critic        networks of the critics' ensemble
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Transition(eqx.Module):
    """Rows of experience, real or imagined. `terminated` is 1 where the episode truly ended; time limits do not
    count."""

    obs: Float[Array, "*seed rows obs"]
    act: Float[Array, "*seed rows act"]
    reward: Float[Array, "*seed rows"]
    next_obs: Float[Array, "*seed rows obs"]
    terminated: Float[Array, "*seed rows"]


def blank_transitions(num_rows: int, obs_size: int, act_size: int) -> Transition:
    """Rows of zeros."""
    obs, flat = jnp.zeros((num_rows, obs_size)), jnp.zeros(num_rows)
    return Transition(obs, jnp.zeros((num_rows, act_size)), flat, obs, flat)


class Rollout(eqx.Module):
    """An imagined trajectory per batch row. `alive[t]` is 0 from the state on in which the episode has ended, or the
    probability that it has not."""

    obs: Float[Array, "states batch obs"]
    act: Float[Array, "states batch act"]
    log_prob: Float[Array, "states batch"]
    reward: Float[Array, "horizon batch"]
    alive: Float[Array, "states batch"]


class Effort(eqx.Module):
    """How much work an iteration does. Traced values, so that a longer first iteration compiles nothing anew."""

    num_rows: Int[Array, ""]
    fit_batches: Int[Array, ""]
    patience: Int[Array, ""]
    max_epochs: Int[Array, ""]
    end_batches: Int[Array, ""]
    num_rounds: Int[Array, ""]


@dataclass(frozen=True)
class Task:
    """What the algorithm must know of an environment. `terminates` maps next observations `[..., obs]` to flags
    `[...]` and takes NumPy and JAX arrays. Without it episodes never end but by their time limit, or the model learns
    when they do. `reward`, if it is known, maps observation, action in [-1, 1] and next observation to the reward."""

    obs_size: int
    act_size: int
    terminates: Callable[[Any], Any] | None
    learns_termination: bool = False
    reward: Callable[[Any, Any, Any], Any] | None = None

    @property
    def can_end(self) -> bool:
        """Whether an episode may end before its time limit."""
        return self.terminates is not None or self.learns_termination
