"""Dropout, SiLU and LayerNorm of one hidden layer, forwards and backwards, in one pass over memory each.

Left to itself XLA makes several passes of it, which is what most of a fit's time on a GPU goes into. The arithmetic
is written once, for one row; on a GPU a Pallas kernel runs it, elsewhere it is plain JAX. `vmap` maps either over
rows, members and seeds.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, UInt32


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def activate(
    z: Float[Array, " width"], seed: UInt32[Array, ""], rate: float, norm_eps: float
) -> Float[Array, " width"]:
    """LayerNorm(SiLU(dropout(z))). A share `rate` of the units, chosen by a hash of seed and unit, is dropped."""
    return _on_device(_forward, rate, norm_eps, seed, z)


def _save(z, seed, rate, norm_eps):
    return activate(z, seed, rate, norm_eps), (z, seed)


def _pull_back(rate, norm_eps, saved, slope):
    z, seed = saved
    return _on_device(_backward, rate, norm_eps, seed, z, slope), None


activate.defvjp(_save, _pull_back)


def _on_device(function, rate: float, norm_eps: float, seed: UInt32[Array, ""], *rows: Float[Array, " width"]):
    """Runs a function of rows as one Pallas kernel where the device and the width allow it."""
    plain = functools.partial(function, rate, norm_eps)
    width = rows[0].shape[0]
    if width & (width - 1):  # Triton's blocks are powers of two
        return plain(seed, *rows)
    return jax.lax.platform_dependent(seed, *rows, cuda=functools.partial(_kernel, plain), default=plain)


def _kernel(
    function, seed: UInt32[Array, ""], *rows: Float[Array, " width"], interpret: bool = False
) -> Float[Array, " width"]:
    from jax.experimental.pallas import triton

    def body(seed_ref, *refs):
        *inputs, output = refs
        output[...] = function(seed_ref[0], *(ref[...] for ref in inputs))

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(rows[0].shape, rows[0].dtype),
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )(seed[None], *rows)


def _forward(
    rate: float, norm_eps: float, seed: UInt32[Array, ""], z: Float[Array, " width"]
) -> Float[Array, " width"]:
    kept, _ = _dropped(rate, seed, z)
    normed, _ = _normed(kept * _sigmoid(kept), norm_eps)
    return normed


def _backward(
    rate: float,
    norm_eps: float,
    seed: UInt32[Array, ""],
    z: Float[Array, " width"],
    slope: Float[Array, " width"],
) -> Float[Array, " width"]:
    """Computes the forward pass again rather than reading it back."""
    kept, keep = _dropped(rate, seed, z)
    gate = _sigmoid(kept)
    normed, scale = _normed(kept * gate, norm_eps)
    slope = scale * (slope - normed * _mean(slope * normed))
    slope = slope - _mean(slope)
    slope = slope * gate * (1.0 + kept * (1.0 - gate))
    return slope if keep is None else jnp.where(keep, slope * (1.0 / (1.0 - rate)), 0.0)


def _dropped(
    rate: float, seed: UInt32[Array, ""], z: Float[Array, " width"]
) -> tuple[Float[Array, " width"], Bool[Array, " width"] | None]:
    if rate == 0.0:
        return z, None
    h = jax.lax.broadcasted_iota(jnp.uint32, z.shape, 0) * jnp.uint32(0x9E3779B9) + seed
    for multiplier in (0x7FEB352D, 0x846CA68B):
        h = (h ^ (h >> 16)) * jnp.uint32(multiplier)
    keep = (h ^ (h >> 16)) >= jnp.uint32(round(rate * 2**32))
    return jnp.where(keep, z * (1.0 / (1.0 - rate)), 0.0), keep


def _normed(x: Float[Array, " width"], eps: float) -> tuple[Float[Array, " width"], Float[Array, ""]]:
    centred = x - _mean(x)
    scale = jax.lax.rsqrt(_mean(centred * centred) + eps)
    return centred * scale, scale


def _sigmoid(x: Float[Array, " width"]) -> Float[Array, " width"]:
    return 1.0 / (1.0 + jnp.exp(-x))


def _mean(x: Float[Array, " width"]) -> Float[Array, ""]:
    return jnp.sum(x) * (1.0 / x.shape[0])
