"""The networks, each for ONE input and one member; batches and ensembles come from `vmap` at the call.

All are the same plain chain: linear, dropout, SiLU, LayerNorm (without affine), linear, ... , linear.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from doublehorizon.config import CriticConfig, ModelConfig, PolicyConfig
from doublehorizon.kernels import activate

_MIN_ACTION_STD = 1e-5


class Linear(eqx.Module):
    """Kaiming-normal weights and small random biases, as the authors' ensembles start."""

    weight: Float[Array, "in out"]
    bias: Float[Array, " out"]

    def __init__(self, in_size: int, out_size: int, key: PRNGKeyArray):
        key_weight, key_bias = jr.split(key)
        self.weight = jr.normal(key_weight, (in_size, out_size)) * jnp.sqrt(2.0 / in_size)
        self.bias = jr.normal(key_bias, (out_size,)) * (0.5 / jnp.sqrt(in_size))

    def __call__(self, x: Float[Array, " in"]) -> Float[Array, " out"]:
        return x @ self.weight + self.bias


class Mlp(eqx.Module):
    """Four linear layers; `norm_eps[i]` is LayerNorm's epsilon before layer i + 1 (None: neither LayerNorm nor dropout
    there)."""

    layers: tuple[Linear, ...]
    norm_eps: tuple[float | None, ...] = eqx.field(static=True)
    dropout: tuple[float, ...] = eqx.field(static=True)

    def __call__(self, x: Float[Array, " in"], seed: UInt32[Array, ""] | None = None) -> Float[Array, " out"]:
        """With a seed (see `dropout_seeds`), dropout is on."""
        for i, layer in enumerate(self.layers[:-1]):
            x, eps = layer(x), self.norm_eps[i]
            if eps is None:
                x = jax.nn.silu(x)
            elif seed is None:
                x = activate(x, jnp.uint32(0), 0.0, eps)
            else:
                x = activate(x, seed + jnp.uint32(i * 0x632BE5AB), self.dropout[i], eps)
        return self.layers[-1](x)


def _mlp_layers(sizes: tuple[int, ...], key: PRNGKeyArray) -> tuple[Linear, ...]:
    keys = jr.split(key, len(sizes) - 1)
    return tuple(Linear(i, o, k) for i, o, k in zip(sizes[:-1], sizes[1:], keys, strict=True))


def dropout_seeds(num_rows: int, key: PRNGKeyArray) -> UInt32[Array, " rows"]:
    """A seed per row, from which `kernels.activate` hashes its dropout masks: a hash can be computed
    inside a kernel, and again in the backward pass, so that no mask is stored."""
    return jr.bits(key, ()) + jnp.arange(num_rows, dtype=jnp.uint32) * jnp.uint32(0x85EBCA6B)


class Dynamics(eqx.Module):
    """One member of the model: normalised observation and action to normalised [reward, change of observation],
    with a noise scale that does not depend on the input."""

    mlp: Mlp
    log_noise: Float[Array, " target"]

    def __init__(self, config: ModelConfig, obs_size: int, act_size: int, key: PRNGKeyArray):
        width, target_size = config.width, 1 + obs_size
        layers = _mlp_layers((obs_size + act_size, width, width, width, target_size), key)
        self.mlp = Mlp(layers, config.norm_eps, config.dropout)
        self.log_noise = jnp.zeros(target_size)

    def __call__(
        self, obs: Float[Array, " obs"], act: Float[Array, " act"], seed: UInt32[Array, ""] | None = None
    ) -> Float[Array, " target"]:
        return self.mlp(jnp.concatenate([obs, act]), seed)


class Critic(eqx.Module):
    """One critic, unscaled: its output stands for a place between the bounds of Q, 0 in the middle at the start."""

    mlp: Mlp

    def __init__(self, config: CriticConfig, obs_size: int, act_size: int, key: PRNGKeyArray):
        width = config.width
        layers = _mlp_layers((obs_size + act_size, width, width, width, 1), key)
        layers = (*layers[:-1], jax.tree.map(jnp.zeros_like, layers[-1]))
        self.mlp = Mlp(layers, (config.norm_eps,) * 3, (config.dropout,) * 3)

    def __call__(
        self, obs: Float[Array, " obs"], act: Float[Array, " act"], seed: UInt32[Array, ""] | None = None
    ) -> Float[Array, ""]:
        return self.mlp(jnp.concatenate([obs, act]), seed)[0]


class Actor(eqx.Module):
    """A tanh-squashed Gaussian policy over normalised observations."""

    mlp: Mlp

    def __init__(self, config: PolicyConfig, obs_size: int, act_size: int, key: PRNGKeyArray):
        width = config.width
        key_layers, key_orthogonal = jr.split(key)
        layers = _mlp_layers((obs_size, width, width, width, 2 * act_size), key_layers)
        keys = jr.split(key_orthogonal, len(layers))
        self.mlp = Mlp(
            tuple(_orthogonal(layer, k) for layer, k in zip(layers, keys, strict=True)),
            (None,) * 3,
            (0.0,) * 3,
        )

    def __call__(self, obs: Float[Array, " obs"]) -> tuple[Float[Array, " act"], Float[Array, " act"]]:
        """Mean and standard deviation before squashing."""
        mean, raw_std = jnp.split(self.mlp(obs), 2)
        return mean, jax.nn.softplus(raw_std) + _MIN_ACTION_STD


def _orthogonal(layer: Linear, key: PRNGKeyArray) -> Linear:
    weight = jax.nn.initializers.orthogonal()(key, layer.weight.shape)
    return eqx.tree_at(lambda one: (one.weight, one.bias), layer, (weight, jnp.zeros_like(layer.bias)))


def sample_action(
    actor: Actor, obs: Float[Array, " obs"], noise: Float[Array, " act"]
) -> tuple[Float[Array, " act"], Float[Array, ""]]:
    """The action that standard normal `noise` gives, reparametrised, and its log-probability."""
    mean, std = actor(obs)
    unsquashed = mean + std * noise
    log_prob = -0.5 * jnp.square(noise) - jnp.log(std) - 0.5 * jnp.log(2 * jnp.pi)
    # log |d tanh(u) / du|, in the form that neither overflows nor loses precision for large |u|
    log_slope = 2.0 * (jnp.log(2.0) - unsquashed - jax.nn.softplus(-2.0 * unsquashed))
    return jnp.tanh(unsquashed), jnp.sum(log_prob - log_slope)


def ensemble(make, num_members: int, key: PRNGKeyArray):
    """`num_members` networks made by `make(key)`, as one network with a leading member axis."""
    return eqx.filter_vmap(make)(jr.split(key, num_members))
