"""Records that travel between modules, and the names of their axes.

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
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Transition(eqx.Module):
    """Steps of experience, real or imagined. `terminated` is 1 where the episode truly ended; time limits do not
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
    """An imagined trajectory per batch row. `alive[t]` is 0 from the state on in which the episode has ended; where
    termination is learnt it is the probability that it has not. `going_reward` is what a step brings if the episode
    goes on, and `reward` what is expected of it."""

    obs: Float[Array, "states batch obs"]
    act: Float[Array, "states batch act"]
    log_prob: Float[Array, "states batch"]
    reward: Float[Array, "horizon batch"]
    going_reward: Float[Array, "horizon batch"]
    alive: Float[Array, "states batch"]


class Budget(eqx.Module):
    """How much work an iteration may do (see `agent.iteration_budget`): plain numbers, or arrays once `traced`."""

    num_rows: int
    """Transitions stored in each replay."""
    num_new: int
    """Those of them that no fit has seen."""
    fit_batches: int
    """Minibatches of an epoch of the model's fit."""
    patience: int
    """Epochs without improvement after which a fit stops."""
    max_epochs: int
    """Epochs after which it stops in any case."""
    termination_batches: int
    """Minibatches of the termination model's fit."""
    num_rounds: int
    """Rounds of a distribution rollout and joint updates."""

    def traced(self) -> "Budget":
        """As arrays, for a program's arguments: a longer first iteration compiles nothing anew."""
        return jax.tree.map(lambda n: jnp.asarray(n, jnp.int32), self)


@dataclass(frozen=True)
class Task:
    """What the algorithm must know of an environment.

    `terminates` maps next observations `[..., obs]` to flags `[...]` and takes NumPy and JAX arrays; without it
    episodes never end but by their time limit, or the model learns when they do. `reward`, if it is known, maps
    observation, action in [-1, 1] and next observation to the reward.
    """

    obs_size: int
    act_size: int
    terminates: Callable[[Any], Any] | None
    learns_termination: bool = False
    reward: Callable[[Any, Any, Any], Any] | None = None
    episode_steps: int | None = None
    """After how many steps an episode is cut off, where that is known."""

    @property
    def can_end(self) -> bool:
        """Whether an episode may end before its time limit."""
        return self.terminates is not None or self.learns_termination
