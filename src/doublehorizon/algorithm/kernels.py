"""A network's layers, forwards and backwards, in few passes over memory.

A fit is bound by memory, not by arithmetic: left to itself XLA makes several passes for dropout, SiLU and LayerNorm
between two products. On a GPU they are one kernel here, forwards and backwards, and what lies between two products is
kept in 16 bits. Elsewhere the same arithmetic of rows is plain JAX. All is written for some rows of one network;
`vmap` adds members and seeds.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, UInt32

Rows = Float[Array, "rows _"]
Weight = Float[Array, "_ _"]
Bias = Float[Array, " _"]
Seeds = UInt32[Array, " rows"]

_MOST = 65504.0  # the largest number of float16


class Activation(NamedTuple):
    """Dropout, SiLU or ReLU, LayerNorm without affine (None: no LayerNorm). The units that are dropped follow from a
    hash of the row's seed and the unit, which the backward pass computes again: no mask is stored."""

    dropout: float
    norm_eps: float | None
    salt: int
    shape: str = "silu"


class MlpSpec(NamedTuple):
    """The activations between the layers, and in which type a GPU keeps what lies between two products. float16 has
    TensorFloat-32's mantissa, so next to products in TF32 it loses no precision and halves the traffic."""

    activations: tuple[Activation, ...]
    storage: str


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mlp(spec: MlpSpec, weights: tuple[Weight, ...], biases: tuple[Bias, ...], x: Rows, seeds: Seeds) -> Rows:
    """linear, activation, linear, ..., linear."""
    out, _ = _save(spec, weights, biases, x, seeds)
    return out


def _save(spec, weights, biases, x, seeds):
    factors, inputs, products = _cast(spec, weights), [_stored(x, storage(spec))], []
    for activation, factor, bias in zip(spec.activations, factors, biases, strict=False):
        out, product = _forward(spec, activation, inputs[-1], factor, bias, seeds)
        inputs.append(out)
        products.append(product)
    return _product(inputs[-1], factors[-1]) + biases[-1][None], (weights, biases, inputs, products, seeds)


def _pull_back(spec, saved, slope):
    weights, biases, inputs, products, seeds = saved
    factors, scale = _cast(spec, weights), _scale(spec, slope)
    slope = slope * scale
    bias_slopes, slopes = [jnp.sum(slope, axis=0)], [_stored(slope, storage(spec))]
    for i in reversed(range(len(products))):
        kept = (products[i], biases[i])
        pulled, total = _backward(spec, spec.activations[i], slopes[0], factors[i + 1], kept, seeds)
        slopes.insert(0, pulled)
        bias_slopes.insert(0, total)
    weight_slopes = [_product(x, s, None, (0, 0)) / scale for x, s in zip(inputs, slopes, strict=True)]
    weight_slopes = tuple(s.astype(weight.dtype) for s, weight in zip(weight_slopes, weights, strict=True))
    return (
        weight_slopes,
        tuple(b / scale for b in bias_slopes),
        _product(slopes[0], factors[0], None, (1, 1)) / scale,
        None,
    )


mlp.defvjp(_save, _pull_back)


def _cast(spec: MlpSpec, weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    return tuple(weight.astype(storage(spec)) for weight in weights)


def _scale(spec: MlpSpec, slope: Rows) -> Float[Array, ""]:
    """float16 reaches from 6e-8 to 65504: the largest slope is put where there is room on both sides."""
    if storage(spec) != jnp.float16:
        return jnp.ones(())
    return 16.0 / jnp.maximum(jnp.max(jnp.abs(slope)), 1e-30)


def _stored(x: Float[Array, "*shape"], dtype: jnp.dtype) -> Float[Array, "*shape"]:
    """As hidden layers are kept. What is too large for float16 becomes its largest number instead of infinite."""
    return (jnp.clip(x, -_MOST, _MOST) if dtype == jnp.float16 else x).astype(dtype)


def _restored(x: Rows) -> Rows:
    """In float32; a product that was too large for float16 is finite again."""
    return jnp.clip(x.astype(jnp.float32), -_MOST, _MOST) if x.dtype == jnp.float16 else x.astype(jnp.float32)


def _product(
    x: Rows, weight: Weight, dtype: jnp.dtype | None = None, along: tuple[int, int] = (1, 0)
) -> Float[Array, "_ _"]:
    """Summed in float32 along one axis of each, stored as `dtype` or float32. Naming the axes, instead of transposing
    a factor, spares a CPU the copy."""
    axes = ((along[:1], along[1:]), ((), ()))
    return jax.lax.dot_general(x, weight, axes, preferred_element_type=dtype or jnp.float32)


# -- one layer -----------------------------------------------------------------------------------------------


def _forward(
    spec: MlpSpec, activation: Activation, x: Rows, weight: Weight, bias: Bias, seeds: Seeds
) -> tuple[Rows, Rows]:
    """The activated rows, and the product that went into them."""

    def finish(product: Rows, bias: Bias, seeds: Seeds) -> tuple[Rows]:
        return (_activate(activation, _restored(product) + bias[None], seeds),)

    product = _product(x, weight, storage(spec))
    (out,) = _by_rows(activation, finish, (product,), bias, seeds)
    return out, product


def _backward(
    spec: MlpSpec, activation: Activation, slope: Rows, weight: Weight, saved: tuple[Rows, Bias], seeds: Seeds
) -> tuple[Rows, Bias]:
    """The slope of a layer's product, given that of the next one, and its sum over rows: the slope of the bias."""

    def finish(slope: Rows, product: Rows, bias: Bias, seeds: Seeds) -> tuple[Rows, Bias]:
        z = _restored(product) + bias[None]
        pulled = _pull_activation(activation, _restored(slope), z, seeds)
        return pulled, jnp.sum(pulled, axis=0)

    product, bias = saved
    slope = _product(slope, weight, storage(spec), (1, 1))
    pulled, totals = _by_rows(activation, finish, (slope, product), bias, seeds)
    return pulled, totals


def _activate(activation: Activation, z: Rows, seeds: Seeds) -> Rows:
    kept, _ = _dropped(activation, z, seeds)
    out = kept * _gate(activation, kept)
    if activation.norm_eps is None:
        return out
    mean, scale = _statistics(out, activation.norm_eps)
    return (out - mean) * scale


def _pull_activation(activation: Activation, slope: Rows, z: Rows, seeds: Seeds) -> Rows:
    """Computes the forward pass again rather than reading it back."""
    kept, keep = _dropped(activation, z, seeds)
    gate = _gate(activation, kept)
    if activation.norm_eps is not None:
        out = kept * gate
        mean, scale = _statistics(out, activation.norm_eps)
        mean_slope = _mean(slope)
        # the normalised rows' product with the slope, from sums that need not wait for each other
        along = scale * (_mean(slope * out) - mean * mean_slope)
        slope = scale * (slope - mean_slope - (out - mean) * (scale * along))
    slope = slope * gate * (1.0 + kept * (1.0 - gate))
    return slope if keep is None else jnp.where(keep, slope * (1.0 / (1.0 - activation.dropout)), 0.0)


def _dropped(activation: Activation, z: Rows, seeds: Seeds) -> tuple[Rows, Bool[Array, "rows _"] | None]:
    if activation.dropout == 0.0:
        return z, None
    unit = jax.lax.broadcasted_iota(jnp.uint32, z.shape, 1)
    h = unit * jnp.uint32(0x9E3779B9) + (seeds + jnp.uint32(activation.salt))[:, None]
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)  # the upper bits, which decide, are well mixed now
    keep = h >= jnp.uint32(round(activation.dropout * 2**32))
    return jnp.where(keep, z * (1.0 / (1.0 - activation.dropout)), 0.0), keep


def _statistics(x: Rows, eps: float) -> tuple[Float[Array, "rows 1"], Float[Array, "rows 1"]]:
    """LayerNorm's mean and inverse deviation, in one pass."""
    mean = _mean(x)
    variance = jnp.maximum(_mean(x * x) - mean * mean, 0.0)
    return mean, jax.lax.rsqrt(variance + eps)


def _gate(activation: Activation, x: Rows) -> Rows:
    """What a unit is multiplied with. Where it is 0 or 1, a slope's formula for SiLU holds for ReLU too."""
    return _sigmoid(x) if activation.shape == "silu" else (x > 0).astype(x.dtype)


def _sigmoid(x: Rows) -> Rows:
    """In the form that costs least: a GPU has an instruction for the exponential, XLA's tanh is fast on a CPU."""
    return 1.0 / (1.0 + jnp.exp(-x)) if on_gpu() else 0.5 + 0.5 * jnp.tanh(0.5 * x)


def _mean(x: Rows) -> Float[Array, "rows 1"]:
    return (jnp.sum(x, axis=1) * (1.0 / x.shape[1]))[:, None]


# -- where a GPU kernel runs the arithmetic of rows -------------------------------------------------------------

interpret = False  # tests set it: kernels then run, slowly, anywhere
_TILE, _WARPS = 8, 4  # rows of a program and its warps: the fastest of those tried on an H200


def on_gpu() -> bool:
    """Whether what is traced now will run on a GPU."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    platform = jax.default_backend() if device is None else getattr(device, "platform", device)
    return interpret or platform in ("gpu", "cuda")


def storage(spec: MlpSpec) -> jnp.dtype:
    """The type in which hidden layers are kept: elsewhere than on a GPU float32, whatever the spec."""
    return jnp.dtype(spec.storage if on_gpu() else "float32")


def _by_rows(activation: Activation, finish: Callable, rows: tuple[Rows, ...], bias: Bias, seeds: Seeds):
    """`finish(*rows, bias, seeds)`: new rows, stored as the given ones, and perhaps totals over them. XLA fuses well
    what is element-wise alone; with LayerNorm's means in it or totals over many rows, a kernel saves passes."""
    num_rows, width = rows[0].shape
    pays = activation.norm_eps is not None or num_rows >= 1024
    if not (on_gpu() and pays and width & (width - 1) == 0 and num_rows % _TILE == 0):  # Triton needs powers of two
        out, *totals = finish(*rows, bias, seeds)
        return _stored(out, rows[0].dtype), *totals

    from jax.experimental.pallas import triton

    def body(*refs):
        values = finish(*(ref[...] for ref in refs[:num_inputs]))
        for ref, value in zip(refs[num_inputs:], values, strict=True):
            ref[...] = _stored(value, ref.dtype)

    inputs = (*rows, bias, seeds)
    num_inputs, num_tiles, num_totals = len(inputs), num_rows // _TILE, len(rows) - 1
    tile = pl.BlockSpec((_TILE, width), lambda i: (i, 0))
    out, *totals = pl.pallas_call(
        body,
        grid=(num_tiles,),
        in_specs=[
            *[tile] * len(rows),
            pl.BlockSpec((width,), lambda i: (0,)),
            pl.BlockSpec((_TILE,), lambda i: (i,)),
        ],
        out_specs=[tile, *[pl.BlockSpec((None, width), lambda i: (i, 0))] * num_totals],
        out_shape=[
            jax.ShapeDtypeStruct((num_rows, width), rows[0].dtype),
            *[jax.ShapeDtypeStruct((num_tiles, width), jnp.float32)] * num_totals,
        ],
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
    )(*inputs)
    return out, *(jnp.sum(total, axis=0) for total in totals)
