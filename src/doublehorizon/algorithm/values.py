"""Value expansion along a rollout, and the bounds of Q: arithmetic on arrays."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from doublehorizon.algorithm.end_rewards import EndRewards
from doublehorizon.algorithm.types import Rollout
from doublehorizon.config import CriticConfig
from doublehorizon.schedule import Number


class Bounds(eqx.Module):
    """Between which values Q is thought to lie; learnt from imagined rewards."""

    low: Float[Array, ""]
    high: Float[Array, ""]
    known: Bool[Array, ""]

    def scale(self, raw: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """A critic's raw output as a value: -1 is the lower bound, 1 the upper one."""
        return 0.5 * (self.high - self.low) * raw + 0.5 * (self.high + self.low)

    def reaching(self, end_rewards: EndRewards | None) -> "Bounds":
        """The bounds, or wider ones: an ended episode is worth 0, and a step that ends one its reward."""
        if end_rewards is None:
            return self
        seen = end_rewards.seen
        low = jnp.where(seen, jnp.minimum(self.low, jnp.minimum(end_rewards.low, 0.0)), self.low)
        high = jnp.where(seen, jnp.maximum(self.high, jnp.maximum(end_rewards.high, 0.0)), self.high)
        return Bounds(low, high, self.known)

    def clip(self, value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """The value, or the bound that it lies beyond."""
        return jnp.clip(value, self.low, self.high)


def unknown_bounds() -> Bounds:
    """Before the first rollout, which sets them."""
    return Bounds(jnp.zeros(()), jnp.zeros(()), jnp.array(False))


def update_bounds(
    config: CriticConfig,
    discount: Number,
    can_end: bool,
    bounds: Bounds,
    rollout: Rollout,
    temperature: Float[Array, ""],
    end_rewards: EndRewards | None = None,
) -> Bounds:
    """Moves the bounds towards the extreme soft rewards of this rollout, earned forever (the paper's appendix on
    bounding the target critic). By `endings`, only those of steps after which the episode goes on can be; `end_rewards`
    are what the others brought."""
    endings = config.bounds == "endings"
    soft_reward, counted = rewards_of_bounds(config, rollout, temperature)
    low, high = (
        quantile(soft_reward.ravel(), counted.ravel() > 0.5, q) / (1.0 - discount)
        for q in (config.quantile, 1.0 - config.quantile)
    )
    if config.bounds == "alive_and_zero" and can_end:
        low, high = jnp.minimum(low, 0.0), jnp.maximum(high, 0.0)
    if endings:  # where every step ends an episode, nothing can be earned forever
        earned = jnp.any(counted > 0.5)
        low, high = jnp.where(earned, low, bounds.low), jnp.where(earned, high, bounds.high)
    rate = jnp.where(bounds.known, config.bounds_rate, 1.0)
    moved = Bounds(bounds.low + rate * (low - bounds.low), bounds.high + rate * (high - bounds.high), jnp.array(True))
    return jax.lax.stop_gradient(moved.reaching(end_rewards if endings else None))


def rewards_of_bounds(
    config: CriticConfig, rollout: Rollout, temperature: Float[Array, ""]
) -> tuple[Float[Array, "horizon batch"], Float[Array, "horizon batch"]]:
    """The soft rewards that set the bounds, and how much each of them counts: above a half or not."""
    horizon, endings = rollout.reward.shape[0], config.bounds == "endings"
    soft_reward = (rollout.going_reward if endings else rollout.reward) - temperature * rollout.log_prob[:horizon]
    counted = {
        "all": jnp.ones_like(soft_reward),
        "endings": rollout.alive[1:],
    }.get(config.bounds, rollout.alive[:horizon])
    return soft_reward, counted


def quantile(x: Float[Array, " n"], counted: Bool[Array, " n"], q: float) -> Float[Array, ""]:
    """The q-quantile, interpolated linearly, of those entries that count."""
    ordered = jnp.sort(jnp.where(counted, x, jnp.inf))
    place = q * (jnp.maximum(jnp.sum(counted), 1) - 1)
    below = jnp.floor(place).astype(jnp.int32)
    above = jnp.ceil(place).astype(jnp.int32)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def expand_value(
    rollout: Rollout, last_q: Float[Array, " batch"], temperature: Float[Array, ""], discount: Number
) -> Float[Array, " batch"]:
    """Eq. 7, value of the first state: discounted soft rewards along the rollout, then the critics' value `last_q` of
    the last state and action. Steps after a termination count nothing."""
    horizon = rollout.reward.shape[0]
    bonus = -temperature * rollout.log_prob
    gained = jnp.concatenate([rollout.reward, last_q[None]]) + bonus
    gained = jnp.where(rollout.alive > 0.0, gained, 0.0)  # 0 times what overflowed is not a number
    discounts = discount ** jnp.arange(horizon + 1)
    return jnp.sum(discounts[:, None] * rollout.alive * gained, axis=0)


def expand_q(
    rollout: Rollout, last_q: Float[Array, " batch"], temperature: Float[Array, ""], discount: Number
) -> Float[Array, " batch"]:
    """Eq. 9, value of the first state and action: Eq. 7 without the entropy bonus of that action."""
    return expand_value(rollout, last_q, temperature, discount) + temperature * rollout.log_prob[0]
