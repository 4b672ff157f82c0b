"""What critics are trained towards over a training: real rewards, imagined soft rewards and critic targets, with the
bounds between which values are thought to lie."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key, PRNGKeyArray

from doublehorizon.algorithm.actor_critic import ActorCritic
from doublehorizon.algorithm.rollouts import no_perturbations
from doublehorizon.algorithm.start_states import StartStates, start_states
from doublehorizon.algorithm.updates import UpdateContext, critic_rollout, critic_target, draw_inputs, start_rollout
from doublehorizon.algorithm.values import rewards_of_bounds
from doublehorizon.analysis.loaded_seed import LoadedSeed


@dataclass(frozen=True)
class TargetStats:
    """At one step of a run, for one seed."""

    step: int
    rewards: np.ndarray
    """Real ones, of the whole replay."""
    soft_rewards: np.ndarray
    """Imagined ones, with the entropy bonus: what the bounds follow."""
    targets: np.ndarray
    low: float
    high: float

    @property
    def outside(self) -> float:
        """Share of targets that lie outside the bounds."""
        return float(np.mean((self.targets < self.low) | (self.targets > self.high)))


def target_stats(loaded: LoadedSeed, step: int, batches: int, key: PRNGKeyArray) -> TargetStats:
    """Targets of `batches` batches of updates, were there any now."""
    actor_critic = loaded.state.actor_critic
    starts = start_states(loaded.config, loaded.num_rows, loaded.replay, loaded.state.model_buffer)
    found = _targets(loaded.context, actor_critic, starts, jr.split(key, batches))
    soft, counted, targets = (np.asarray(x) for x in found)
    return TargetStats(
        step=step,
        rewards=np.asarray(loaded.replay.rows.reward[: loaded.num_rows]),
        soft_rewards=soft[counted > 0.5],
        targets=targets.ravel(),
        low=float(actor_critic.bounds.low),
        high=float(actor_critic.bounds.high),
    )


@eqx.filter_jit
def _targets(
    context: UpdateContext, actor_critic: ActorCritic, starts: StartStates, keys: Key[Array, " batches"]
) -> tuple[Float[Array, "batches horizon batch"], Float[Array, "batches horizon batch"], Float[Array, "batches batch"]]:
    """Soft rewards, how much they count for the bounds, and targets, as in an update of the critics."""
    config = context.config

    def one_batch(key: PRNGKeyArray) -> tuple[Array, Array, Array]:
        inputs = draw_inputs(context, starts, key)
        rollout = start_rollout(context, actor_critic, inputs, no_perturbations(context.task, inputs.noise))
        rollout = critic_rollout(context, actor_critic, inputs, rollout)
        target = critic_target(context, actor_critic, rollout, inputs.target_indices)
        temperature = actor_critic.temperature * context.reward_unit
        return *rewards_of_bounds(config.critic, rollout, temperature), target

    with jax.default_matmul_precision(config.precision):
        return jax.lax.map(one_batch, keys)
