"""Mean and scale of observations and of the model's targets."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_BLOCK = 4096  # rows summed at once
_MIN_VARIANCE = 1e-8  # a constant dimension is divided by 1e-4, not by zero


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


def fit_normalizer(x: Float[Array, "rows size"], num_rows: int | Int[Array, ""]) -> Normalizer:
    """Statistics of the first `num_rows` rows: population variance, in two passes so that float32 suffices."""
    count = jnp.asarray(num_rows, x.dtype)
    mean = _sum(x, num_rows) / count
    variance = _sum(jnp.square(x - mean[None]), num_rows) / count
    return Normalizer(mean, jnp.sqrt(jnp.maximum(variance, _MIN_VARIANCE)))


def _sum(x: Float[Array, "rows size"], num_rows: int | Int[Array, ""]) -> Float[Array, " size"]:
    """Over the first rows, block by block: rounding does not depend on how many unused rows follow."""
    used = (jnp.arange(x.shape[0]) < num_rows)[:, None]
    blocks = jnp.pad(jnp.where(used, x, 0.0), ((0, -x.shape[0] % _BLOCK), (0, 0))).reshape(-1, _BLOCK, x.shape[1])
    total, _ = jax.lax.scan(lambda sum, block: (sum + jnp.sum(block, axis=0), None), jnp.zeros(x.shape[1]), blocks)
    return total


def _along(statistic: Float[Array, " size"], x: Float[Array, "*lead size"]) -> Float[Array, "*ones size"]:
    """The statistic with as many axes as `x`: rank promotion is an error here, as it hides mistakes."""
    return statistic.reshape((1,) * (x.ndim - 1) + statistic.shape)
