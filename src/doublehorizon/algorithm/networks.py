"""The networks, each for some rows and one member; ensembles come from `vmap` at the call.

All are MLPs: linear, dropout, activation, LayerNorm (without affine), linear, ..., linear; dropout and LayerNorm are
optional. They are written for rows rather than for one input because a GPU's kernels work on tiles of rows (see
`kernels.py`).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from doublehorizon.action_scaling import MIN_ACTION_STD
from doublehorizon.algorithm.kernels import Activation, MlpSpec, mlp, storage
from doublehorizon.config import CriticConfig, ModelConfig, PolicyConfig, TerminatorConfig

_MOST_LOG_FACTOR = 3.0  # between the noise of one input and that of the whole


class Linear(eqx.Module):
    """Kaiming-normal weights and small random biases, as the authors' ensembles start."""

    weight: Float[Array, "in out"]
    bias: Float[Array, " out"]

    def __init__(self, in_size: int, out_size: int, key: PRNGKeyArray):
        key_weight, key_bias = jr.split(key)
        self.weight = jr.normal(key_weight, (in_size, out_size)) * jnp.sqrt(2.0 / in_size)
        self.bias = jr.normal(key_bias, (out_size,)) * (0.5 / jnp.sqrt(in_size))


class Mlp(eqx.Module):
    """Linear layers with activations between them."""

    layers: tuple[Linear, ...]
    spec: MlpSpec = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "rows in"], seeds: UInt32[Array, " rows"] | None = None
    ) -> Float[Array, "rows out"]:
        """Under dropout if there are seeds for it (see `dropout_seeds`)."""
        spec = self.spec
        if seeds is None:
            seeds = jnp.zeros(x.shape[0], jnp.uint32)
            spec = spec._replace(activations=tuple(a._replace(dropout=0.0) for a in spec.activations))
        weights, biases = (tuple(getattr(layer, name) for layer in self.layers) for name in ("weight", "bias"))
        return mlp(spec, weights, biases, x, seeds)


def _mlp_spec(
    dropout: tuple[float, ...], norm_eps: tuple[float | None, ...], shape: str = "silu", kept_as: str = "float32"
) -> MlpSpec:
    """Activations after each hidden layer. Every layer drops other units of a row: its salt changes the hash."""
    pairs = enumerate(zip(dropout, norm_eps, strict=True))
    return MlpSpec(tuple(Activation(rate, eps, i * 0x632BE5AB % 2**32, shape) for i, (rate, eps) in pairs), kept_as)


def _mlp_layers(sizes: tuple[int, ...], key: PRNGKeyArray) -> tuple[Linear, ...]:
    keys = jr.split(key, len(sizes) - 1)
    return tuple(Linear(i, o, k) for i, o, k in zip(sizes[:-1], sizes[1:], keys, strict=True))


def dropout_seeds(num_rows: int, key: PRNGKeyArray) -> UInt32[Array, " rows"]:
    """A seed per row, from which `kernels.mlp` hashes its dropout masks."""
    return jr.bits(key, ()) + jnp.arange(num_rows, dtype=jnp.uint32) * jnp.uint32(0x85EBCA6B)


class Dynamics(eqx.Module):
    """One member of the model: normalised observation and action to normalised [reward, change of observation], with
    its noise scale. `log_noise` is that of all inputs or, if it depends on them (`model.noise`), where it starts from.
    """

    mlp: Mlp
    log_noise: Float[Array, " target"]

    def __init__(self, config: ModelConfig, obs_size: int, act_size: int, key: PRNGKeyArray):
        width, target_size = config.width, 1 + obs_size
        out_size = target_size if config.noise == "constant" else 2 * target_size
        layers = _mlp_layers((obs_size + act_size, width, width, width, out_size), key)
        self.mlp = Mlp(
            layers, _mlp_spec(config.dropout, config.norm_eps or (None,) * 3, config.activation, config.storage)
        )
        self.log_noise = jnp.zeros(target_size)

    def __call__(
        self, inputs: Float[Array, "rows in"], seeds: UInt32[Array, " rows"] | None = None
    ) -> tuple[Float[Array, "rows target"], Float[Array, "noises target"]]:
        """Mean and logarithm of the noise scale, which has one row where it is the same for all. `inputs` are
        normalised observations and actions, side by side."""
        out, log_noise = self.mlp(inputs, seeds), self.log_noise[None]
        size = log_noise.shape[1]
        if out.shape[1] == size:
            return out, log_noise
        # a factor of 20 up or down, at most: a likelihood would like to explain some rows perfectly
        return out[:, :size], log_noise + _MOST_LOG_FACTOR * jnp.tanh(out[:, size:] / _MOST_LOG_FACTOR)

    def in_storage_dtype(self) -> "Dynamics":
        """The same network, weights cast to the type in which they are multiplied."""
        dtype = storage(self.mlp.spec)
        weights = [layer.weight.astype(dtype) for layer in self.mlp.layers]
        return eqx.tree_at(lambda d: [layer.weight for layer in d.mlp.layers], self, weights)


class Critic(eqx.Module):
    """One critic, unscaled: -1 and 1 stand for the bounds of Q (see `values.Bounds`); 0 at the start."""

    mlp: Mlp

    def __init__(self, config: CriticConfig, obs_size: int, act_size: int, key: PRNGKeyArray):
        width = config.width
        layers = _mlp_layers((obs_size + act_size, width, width, width, 1), key)
        layers = (*layers[:-1], jax.tree.map(jnp.zeros_like, layers[-1]))
        self.mlp = Mlp(layers, _mlp_spec((config.dropout,) * 3, (config.norm_eps,) * 3, config.activation))

    def __call__(
        self, inputs: Float[Array, "rows in"], seeds: UInt32[Array, " rows"] | None = None
    ) -> Float[Array, " rows"]:
        """`inputs` are normalised observations and actions, side by side."""
        return self.mlp(inputs, seeds)[:, 0]


class TerminationClassifier(eqx.Module):
    """Normalised observation, action and next observation to the logit of the step ending its episode and, if that is
    learnt, the normalised reward that it brings if it does."""

    mlp: Mlp

    def __init__(self, config: TerminatorConfig, obs_size: int, act_size: int, key: PRNGKeyArray):
        sizes = (2 * obs_size + act_size, config.width, config.width, 2 if config.rewards else 1)
        self.mlp = Mlp(_mlp_layers(sizes, key), _mlp_spec((0.0,) * 2, (None,) * 2))

    def __call__(self, inputs: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        return self.mlp(inputs)


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
            _mlp_spec((0.0,) * 3, (None,) * 3),
        )

    def __call__(self, obs: Float[Array, "rows obs"]) -> Float[Array, "rows out"]:
        """Mean and pre-softplus standard deviation side by side, `2 * act`; see `mean_and_std`."""
        return self.mlp(obs)


def mean_and_std(
    actor_out: Float[Array, "rows out"],
) -> tuple[Float[Array, "rows act"], Float[Array, "rows act"]]:
    """Mean and standard deviation of the Gaussian before squashing, from the actor's outputs."""
    mean, raw_std = jnp.split(actor_out, 2, axis=-1)
    return mean, jax.nn.softplus(raw_std) + MIN_ACTION_STD


def orthogonal(in_size: int, out_size: int, key: PRNGKeyArray) -> Float[Array, "in out"]:
    """A random matrix with orthonormal columns, or rows if these are fewer: the factor U of a Gaussian matrix U P, by
    Newton and Schulz's iteration. JAX's own initialiser calls LAPACK, which under `vmap` may hang a CPU forever (seen
    with JAX 0.10 on two cores, in a quarter of all starts)."""
    gauss = jr.normal(key, (in_size, out_size)) / (in_size**0.5 + out_size**0.5)  # no singular value far above 1

    def step(_, x):
        square = jnp.matmul(x.T, x, precision="highest")
        return 1.5 * x - 0.5 * jnp.matmul(x, square, precision="highest")

    # each step multiplies a small singular value by 1.5: 60 bring even one of 1e-9 to 1
    tall = jax.lax.fori_loop(0, 60, step, gauss if in_size >= out_size else gauss.T)
    return tall if in_size >= out_size else tall.T


def _orthogonal(layer: Linear, key: PRNGKeyArray) -> Linear:
    in_size, out_size = layer.weight.shape
    weight = orthogonal(in_size, out_size, key)
    return eqx.tree_at(lambda one: (one.weight, one.bias), layer, (weight, jnp.zeros_like(layer.bias)))


def sample_action(
    mean: Float[Array, "*rows act"], std: Float[Array, "*rows act"], noise: Float[Array, "*rows act"]
) -> tuple[Float[Array, "*rows act"], Float[Array, "*rows"]]:
    """The squashed action for standard normal `noise` (reparametrised), and its log-probability."""
    unsquashed = mean + std * noise
    log_prob = -0.5 * jnp.square(noise) - jnp.log(std) - 0.5 * jnp.log(2 * jnp.pi)
    # log |d tanh(u) / du|, in the form that neither overflows nor loses precision for large |u|
    log_derivative = 2.0 * (jnp.log(2.0) - unsquashed - jax.nn.softplus(-2.0 * unsquashed))
    return jnp.tanh(unsquashed), jnp.sum(log_prob - log_derivative, axis=-1)
