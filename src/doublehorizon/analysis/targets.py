"""What critics are taught over a training: real rewards, imagined soft rewards and critic targets, with the bounds
between which values are thought to lie."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key, PRNGKeyArray

from doublehorizon.agent import replay_as_ring
from doublehorizon.analysis.subject import Subject
from doublehorizon.rollouts import Ring, no_nudges
from doublehorizon.updates import (
    Policy,
    Setting,
    critic_target,
    critic_values,
    draw_chance,
    path_for_critics,
    start_rollout,
)


@dataclass(frozen=True)
class Lesson:
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


def lesson(subject: Subject, step: int, batches: int, key: PRNGKeyArray) -> Lesson:
    """What so many batches of updates would teach the critics now."""
    policy = subject.state.policy
    ring = subject.state.ring or replay_as_ring(subject.config, subject.num_rows, subject.replay)
    soft, alive, targets = (np.asarray(x) for x in _teach(subject.setting, policy, ring, jr.split(key, batches)))
    return Lesson(
        step=step,
        rewards=np.asarray(subject.replay.rows.reward[: subject.num_rows]),
        soft_rewards=soft[alive > 0.5],  # what lies behind an end does not count
        targets=targets.ravel(),
        low=float(policy.bounds.low),
        high=float(policy.bounds.high),
    )


@eqx.filter_jit
def _teach(
    setting: Setting, policy: Policy, ring: Ring, keys: Key[Array, " batches"]
) -> tuple[Float[Array, "batches horizon batch"], Float[Array, "batches horizon batch"], Float[Array, "batches batch"]]:
    """Soft rewards, whether their episodes were running, and targets, computed as `updates.critic_update` does."""

    def one_batch(key: PRNGKeyArray) -> tuple[Array, Array, Array]:
        chance = draw_chance(setting, ring, key)
        rollout = start_rollout(setting, policy, chance, no_nudges(setting.task, chance.noise))
        path = path_for_critics(setting, policy, chance, rollout)
        obs, temperature = setting.world.obs_normalizer.normalize(path.obs[-1]), jnp.exp(policy.log_temperature)
        last_q = critic_values(policy.target_critics, obs, path.act[-1])[chance.target_critics]
        discount = setting.config.policy.discount
        target = critic_target(policy.bounds, path, last_q, temperature, discount)
        horizon = path.reward.shape[0]
        return path.reward - temperature * path.log_prob[:horizon], path.alive[:horizon], target

    with jax.default_matmul_precision(setting.config.precision):
        return jax.lax.map(one_batch, keys)
