"""Ensembles: how they are made, and how their members share the rows of a batch."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray


def ensemble(make, num_members: int, key: PRNGKeyArray):
    """`num_members` networks made by `make(key)`, as one network with a leading member axis."""
    return eqx.filter_vmap(make)(jr.split(key, num_members))


class RowAssignment(eqx.Module):
    """Which member predicts which row: `order` lists the rows, an equal share for each member after the other."""

    order: Int[Array, "*lead batch"]
    inverse: Int[Array, "*lead batch"]

    def to_members(self, x: Float[Array, "batch n"], num_members: int) -> Float[Array, "member share n"]:
        """Each member's share of the rows."""
        return _permute(x, self.order, self.inverse).reshape(num_members, -1, x.shape[-1])

    def to_rows(self, x: Float[Array, "member share n"]) -> Float[Array, "batch n"]:
        """What the members made of their shares, in the order of the rows: undoes `to_members`."""
        return _permute(x.reshape(-1, x.shape[-1]), self.inverse, self.order)


def assign_rows(shape: tuple[int, ...], key: PRNGKeyArray) -> RowAssignment:
    """Random assignments `[*lead, batch]` (trajectory sampling TS-1): drawn anew along the leading axes, so that a
    trajectory changes its member with every step. The key is consumed."""
    order = jnp.argsort(jr.bits(key, shape), axis=-1)  # sorting random bits gives a random permutation
    return RowAssignment(order, jnp.argsort(order, axis=-1))


def even_shares(num_rows: int, num_members: int) -> int:
    """The least number of rows, at least `num_rows`, that the members can share evenly."""
    return -(-num_rows // max(1, num_members)) * max(1, num_members)


@jax.custom_vjp
def _permute(
    x: Float[Array, "batch n"], order: Int[Array, " batch"], inverse: Int[Array, " batch"]
) -> Float[Array, "batch n"]:
    """Rows in another order. Its gradient is taken in the inverse order: left to itself JAX would scatter, which XLA
    cannot fuse with what comes before and after."""
    del inverse
    return x[order]


_permute.defvjp(
    lambda x, order, inverse: (x[order], (order, inverse)),
    lambda orders, cotangent: (_permute(cotangent, orders[1], orders[0]), None, None),
)
