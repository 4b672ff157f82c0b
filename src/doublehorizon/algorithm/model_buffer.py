"""The model buffer: the most recent imagined states, or steps, from which training starts."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from doublehorizon.algorithm.types import Transition


class States(eqx.Module):
    """Observations alone; as a `Transition` has more than these, `.obs` serves for both."""

    obs: Float[Array, "*seed rows obs"]


Rows = States | Transition


class ModelBuffer(eqx.Module):
    """A ring of rows in the environment's own units: statistics may change under them."""

    rows: Rows
    position: Int[Array, "*seed"]
    size: Int[Array, "*seed"]


def empty(rows: Rows) -> ModelBuffer:
    """A buffer with room for as many rows as are given, whose values do not matter."""
    zero = jnp.zeros((), jnp.int32)
    return ModelBuffer(rows, zero, zero)


def cleared(buffer: ModelBuffer) -> ModelBuffer:
    """The buffer as if nothing had been stored."""
    return ModelBuffer(buffer.rows, jnp.zeros_like(buffer.position), jnp.zeros_like(buffer.size))


def push(buffer: ModelBuffer, rows: Rows) -> ModelBuffer:
    """Stores rows over the oldest ones."""
    (capacity, *_), (count, *_) = buffer.rows.obs.shape, rows.obs.shape
    at = (buffer.position + jnp.arange(count)) % capacity
    return ModelBuffer(
        rows=jax.tree.map(lambda old, new: old.at[at].set(new), buffer.rows, rows),
        position=(buffer.position + count) % capacity,
        size=jnp.minimum(buffer.size + count, capacity),
    )


def sample(buffer: ModelBuffer, batch_size: int, key: PRNGKeyArray) -> Rows:
    """Rows drawn uniformly, with replacement."""
    at = jr.randint(key, (batch_size,), 0, buffer.size)
    return jax.tree.map(lambda x: x[at], buffer.rows)
