"""Mean and scale of observations and of the model's targets."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_BLOCK = 4096  # rows summed at once
_ROUNDING = 1e-6  # of float32, relative
_SMALLEST_CHANGE = 1e-6  # of an observation, relative to its spread


class Normalizer(eqx.Module):
    """Shifts and scales the last axis to mean 0 and standard deviation 1."""

    mean: Float[Array, " size"]
    std: Float[Array, " size"]

    def normalize(self, x: Float[Array, "*lead size"]) -> Float[Array, "*lead size"]:
        return (x - _along(self.mean, x)) / _along(self.std, x)

    def denormalize(self, x: Float[Array, "*lead size"]) -> Float[Array, "*lead size"]:
        return x * _along(self.std, x) + _along(self.mean, x)


def identity(size: int) -> Normalizer:
    """The normaliser before anything was seen."""
    return Normalizer(jnp.zeros(size), jnp.ones(size))


def fit_observations(obs: Float[Array, "rows obs"], used: Bool[Array, " rows"]) -> Normalizer:
    """Statistics of the rows that are used. A number that never changes is not divided by its spread, but by 1: what a
    model makes of it would be enlarged without end."""
    mean, std = _spread(obs, used)
    return Normalizer(mean, jnp.where(std > 0.0, std, 1.0))


def fit_changes(change: Float[Array, "rows obs"], used: Bool[Array, " rows"], obs_normalizer: Normalizer) -> Normalizer:
    """Statistics of the changes of observations. What does not change is predicted to change hardly at all."""
    mean, variance = _moments(change, used)
    return Normalizer(mean, jnp.maximum(jnp.sqrt(variance), _SMALLEST_CHANGE * obs_normalizer.std))


def fit_rewards(reward: Float[Array, " rows"], used: Bool[Array, " rows"], ended: Bool[Array, " rows"]) -> Normalizer:
    """Mean and spread of the rewards, on whatever scale they are. Those of steps that ended an episode count only where
    all others are the same. Where all rewards are the same, their spread is taken to be 1."""
    mean, going = _spread(reward[:, None], used & ~ended)
    _, all_rewards = _spread(reward[:, None], used)
    return Normalizer(mean, jnp.where(going > 0.0, going, jnp.where(all_rewards > 0.0, all_rewards, 1.0)))


def _spread(x: Float[Array, "rows size"], used: Bool[Array, " rows"]) -> tuple[Float[Array, " size"], ...]:
    """Mean and standard deviation, which is 0 if it may be due to rounding."""
    mean, variance = _moments(x, used)
    std = jnp.sqrt(variance)
    return mean, jnp.where(std > _ROUNDING * jnp.abs(mean), std, 0.0)


def _moments(x: Float[Array, "rows size"], used: Bool[Array, " rows"]) -> tuple[Float[Array, " size"], ...]:
    """Mean and population variance, in two passes so that float32 suffices; 0 where no row is used."""
    count = jnp.maximum(jnp.sum(used), 1).astype(x.dtype)
    mean = _sum(x, used) / count
    return mean, _sum(jnp.square(x - mean[None]), used) / count


def _sum(x: Float[Array, "rows size"], used: Bool[Array, " rows"]) -> Float[Array, " size"]:
    """Over the used rows, block by block: rounding does not depend on how many unused rows follow."""
    x = jnp.where(used[:, None], x, 0.0)
    blocks = jnp.pad(x, ((0, -x.shape[0] % _BLOCK), (0, 0))).reshape(-1, _BLOCK, x.shape[1])
    total, _ = jax.lax.scan(lambda sum, block: (sum + jnp.sum(block, axis=0), None), jnp.zeros(x.shape[1]), blocks)
    return total


def _along(statistic: Float[Array, " size"], x: Float[Array, "*lead size"]) -> Float[Array, "*ones size"]:
    """The statistic with as many axes as `x`: rank promotion is an error here, as it hides mistakes."""
    return statistic.reshape((1,) * (x.ndim - 1) + statistic.shape)
