"""What the steps that really ended an episode brought: a reward that is earned once."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from doublehorizon.algorithm.normalizer import Normalizer, fit_rewards


class EndRewards(eqx.Module):
    """Range, mean and spread of the rewards of endings; nothing is meant by them before the first one was `seen`."""

    low: Float[Array, ""]
    high: Float[Array, ""]
    normalizer: Normalizer
    seen: Bool[Array, ""]

    def denormalize(self, x: Float[Array, " rows"]) -> Float[Array, " rows"]:
        """A prediction in the reward's own units, and never beyond what was really earned."""
        return jnp.clip(self.normalizer.denormalize(x[:, None])[:, 0], self.low, self.high)


def unknown_end_rewards() -> EndRewards:
    """Before the first ending."""
    zero, one = jnp.zeros(()), jnp.ones(())
    return EndRewards(zero, zero, Normalizer(zero[None], one[None]), jnp.array(False))


def fit_end_rewards(reward: Float[Array, " rows"], ended: Bool[Array, " rows"]) -> EndRewards:
    """Of the rows that ended an episode."""
    seen = jnp.any(ended)
    low, high = jnp.min(jnp.where(ended, reward, jnp.inf)), jnp.max(jnp.where(ended, reward, -jnp.inf))
    low, high = (jnp.where(seen, x, 0.0) for x in (low, high))
    return EndRewards(low, high, fit_rewards(reward, ended, jnp.zeros_like(ended)), seen)
