"""Value expansion along a rollout, and the bounds of Q: arithmetic on arrays."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from doublehorizon.algorithm.types import Rollout
from doublehorizon.config import CriticConfig


class Bounds(eqx.Module):
    """Between which values Q is thought to lie; learnt from imagined rewards."""

    low: Float[Array, ""]
    high: Float[Array, ""]
    known: Bool[Array, ""]

    def scale(self, raw: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """A critic's raw output as a value: -1 is the lower bound, 1 the upper one."""
        return 0.5 * (self.high - self.low) * raw + 0.5 * (self.high + self.low)

    def clip(self, value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """The value, or the bound that it lies beyond."""
        return jnp.clip(value, self.low, self.high)


def unknown_bounds() -> Bounds:
    """Before the first rollout, which sets them."""
    return Bounds(jnp.zeros(()), jnp.zeros(()), jnp.array(False))


def update_bounds(
    config: CriticConfig,
    discount: float,
    can_end: bool,
    bounds: Bounds,
    rollout: Rollout,
    temperature: Float[Array, ""],
) -> Bounds:
    """Moves the bounds towards the extreme soft rewards of this rollout, earned forever (the paper's appendix on
    bounding the target critic)."""
    horizon = rollout.reward.shape[0]
    soft_reward = rollout.reward - temperature * rollout.log_prob[:horizon]
    counted = jnp.ones_like(soft_reward) if config.bounds == "all" else rollout.alive[:horizon]
    low, high = (
        quantile(soft_reward.ravel(), counted.ravel() > 0.5, q) / (1.0 - discount)
        for q in (config.quantile, 1.0 - config.quantile)
    )
    if config.bounds == "alive_and_zero" and can_end:
        low, high = jnp.minimum(low, 0.0), jnp.maximum(high, 0.0)
    rate = jnp.where(bounds.known, config.bounds_rate, 1.0)
    moved = Bounds(bounds.low + rate * (low - bounds.low), bounds.high + rate * (high - bounds.high), jnp.array(True))
    return jax.lax.stop_gradient(moved)


def quantile(x: Float[Array, " n"], counted: Bool[Array, " n"], q: float) -> Float[Array, ""]:
    """The q-quantile, interpolated linearly, of those entries that count."""
    ordered = jnp.sort(jnp.where(counted, x, jnp.inf))
    place = q * (jnp.maximum(jnp.sum(counted), 1) - 1)
    below = jnp.floor(place).astype(jnp.int32)
    above = jnp.ceil(place).astype(jnp.int32)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def expand_value(
    rollout: Rollout, last_q: Float[Array, " batch"], temperature: Float[Array, ""], discount: float
) -> Float[Array, " batch"]:
    """Eq. 7, value of the first state: discounted soft rewards along the rollout, then the critics' value `last_q` of
    the last state and action. Steps after a termination count nothing."""
    horizon = rollout.reward.shape[0]
    bonus = -temperature * rollout.log_prob
    gained = jnp.concatenate([rollout.reward, last_q[None]]) + bonus
    discounts = discount ** jnp.arange(horizon + 1)
    return jnp.sum(discounts[:, None] * rollout.alive * gained, axis=0)


def expand_q(
    rollout: Rollout, last_q: Float[Array, " batch"], temperature: Float[Array, ""], discount: float
) -> Float[Array, " batch"]:
    """Eq. 9, value of the first state and action: Eq. 7 without the entropy bonus of that action."""
    return expand_value(rollout, last_q, temperature, discount) + temperature * rollout.log_prob[0]
