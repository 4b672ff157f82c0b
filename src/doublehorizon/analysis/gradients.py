"""How far to roll out: bias and noise of the value's gradient by the horizon of the training rollout (the paper's
appendix on the trade-off in policy gradient estimation), from the replay and the model alone.

The gradient of the value of a state b, averaged over R rollouts of t steps, is g_tb; over all B states, g_t. The
longest horizon T stands for the truth. Gradients are never held for all states: only sums over groups of states are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Key, PRNGKeyArray

from doublehorizon.algorithm.actor_critic import ActorCritic
from doublehorizon.algorithm.ensemble import even_shares
from doublehorizon.algorithm.rollouts import RolloutNoise, draw_noise, no_perturbations, training_rollout
from doublehorizon.algorithm.updates import UpdateContext, actor_gradient, actor_objective
from doublehorizon.analysis.loaded_seed import LoadedSeed, as_rows
from doublehorizon.errors import UserError

HORIZONS = (1, 3, 5, 7, 9)
GROUPS = 16  # of states; how their sums differ says how sure a figure is
_SIDE_BY_SIDE = 8  # states that are rolled out at once
TINY = 1e-30  # an error of 0 could not be compared by ratios
_ADAM = (1 - 0.9) / (1 + 0.9)  # variance of the mean of recent gradients that Adam steps along, by that of one of them


class Sums(eqx.Module):
    """Over the states of a group, for each horizon."""

    gradient: Float[Array, "horizon parameters"]
    square: Float[Array, " horizon"]
    """Of |g_tb|^2."""
    from_truth: Float[Array, " horizon"]
    """Of |g_tb - g_Tb|^2."""
    between_halves: Float[Array, " horizon"]
    """Of the squared distance of two halves of a state's rollouts: how much a single rollout's gradient varies."""


@dataclass(frozen=True)
class Tradeoff:
    """What was found for each horizon. Gradients are divided by the number of parameters, as the paper's are."""

    horizons: tuple[int, ...]
    num_states: int
    num_rollouts: int
    bias: np.ndarray
    """The paper's Bias_t: mean of |g_tb - g_T|^2 over states. It contains how much states differ."""
    distance: np.ndarray
    """|g_t - g_T|^2, less what noise adds to it: how wrong the gradient is on the average."""
    standard_error: np.ndarray
    """The paper's SEM_t: of g_t, over states."""
    noise: np.ndarray
    """Mean squared error that noise adds to the gradient of a batch in training, with one rollout per state."""
    without: np.ndarray
    """What `error` is when one group of states is left out, for each of them: the jackknife."""

    @property
    def error(self) -> np.ndarray:
        """How wrong a training step is."""
        return _error(self.distance, self.noise)


def _error(distance: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """The distance, whose estimate may be below 0, and what is left of the noise in Adam's mean of gradients."""
    return np.maximum(np.maximum(distance, 0.0) + _ADAM * noise, TINY)


def measure(
    loaded: LoadedSeed,
    horizons: Sequence[int] = HORIZONS,
    num_states: int = 256,
    num_rollouts: int = 64,
    key: PRNGKeyArray | None = None,
    tick: Callable[[], None] = lambda: None,
    from_replay: bool = False,
) -> Tradeoff:
    """Measures all horizons on the same states, those where training begins or any of the replay, with the same random
    numbers. `tick` is called for each group."""
    horizons = tuple(sorted(set(horizons)))
    num_rollouts = 2 * even_shares(-(-num_rollouts // 2), loaded.config.model.members)
    num_states = even_shares(num_states, GROUPS * _SIDE_BY_SIDE)
    if len(horizons) < 2 or horizons[0] < 1:
        raise UserError(f"the horizons are {horizons}, but at least two are needed, of 1 step or more.")
    key_states, key_rollouts = jr.split(jr.key(0) if key is None else key)
    starts = loaded.drawn(num_states, key_states).obs if from_replay else loaded.starts(num_states, key_states)
    states = starts.reshape(GROUPS, -1, loaded.task.obs_size)
    keys = jr.split(key_rollouts, num_states).reshape(GROUPS, -1)
    groups = []
    for group in range(GROUPS):
        arguments = (loaded.context, loaded.state.actor_critic, states[group], keys[group])
        groups.append(jax.device_get(_sums(horizons, num_rollouts, *arguments)))
        _require_finite(horizons, groups[-1])
        tick()
    return _tradeoff(horizons, (num_states, num_rollouts), loaded.config.policy.batch_size, groups)


def _require_finite(horizons: tuple[int, ...], sums: Sums) -> None:
    wild = [t for t, square in zip(horizons, sums.square, strict=True) if not np.isfinite(square)]
    if wild:
        raise UserError(
            f"the gradients at the horizon {wild[0]} are not finite: the model does not carry that far. Compare "
            f"fewer steps with --horizons{', or train the run for longer' if wild[0] == horizons[0] else ''}."
        )


@eqx.filter_jit
def _sums(
    horizons: tuple[int, ...],
    num_rollouts: int,
    context: UpdateContext,
    actor_critic: ActorCritic,
    states: Float[Array, "states obs"],
    keys: Key[Array, " states"],
) -> Sums:
    """Some states after others. Those that are rolled out side by side share the members of the model evenly among all
    of their rows, as the rows of a batch in training do, not each among its own."""

    def some_states(sums: Sums, states_and_keys: tuple[Array, Array]) -> tuple[Sums, None]:
        some, keys = states_and_keys
        start = as_rows(some, num_rollouts // 2)
        halves = jnp.stack([_gradients(context, actor_critic, horizons, start, k) for k in jr.split(keys[0])])
        gradient = jnp.mean(halves, axis=0)
        found = Sums(
            gradient=jnp.sum(gradient, axis=0),
            square=jnp.sum(jnp.square(gradient), axis=(0, 2)),
            from_truth=jnp.sum(jnp.square(gradient - gradient[:, -1:]), axis=(0, 2)),
            between_halves=jnp.sum(jnp.square(halves[0] - halves[1]), axis=(0, 2)),
        )
        return jax.tree.map(jnp.add, sums, found), None

    nothing = jnp.zeros(len(horizons))
    no_gradient = jnp.zeros((len(horizons), ravel_pytree(actor_critic.actor)[0].size))
    several = (states.reshape(-1, _SIDE_BY_SIDE, states.shape[-1]), keys.reshape(-1, _SIDE_BY_SIDE))
    with jax.default_matmul_precision(context.config.precision):
        return jax.lax.scan(some_states, Sums(no_gradient, nothing, nothing, nothing), several)[0]


def _gradients(
    context: UpdateContext,
    actor_critic: ActorCritic,
    horizons: tuple[int, ...],
    start: Float[Array, "rows obs"],
    key: PRNGKeyArray,
) -> Float[Array, "states horizon parameters"]:
    """Of each state's mean value over its rows, by horizon. Longer rollouts begin as the shorter ones do."""
    task, world, actor = context.task, context.world, actor_critic.actor
    noise = draw_noise(task, horizons[-1], start.shape[0], key, context.rollout_noise)

    def by_state(x: Float[Array, "steps rows n"]) -> Float[Array, "states steps share n"]:
        return jnp.swapaxes(x.reshape(x.shape[0], _SIDE_BY_SIDE, -1, x.shape[-1]), 0, 1)

    def one_horizon(horizon: int) -> Float[Array, "states parameters"]:
        first_steps = _beginning(noise, horizon)
        rollout, pull_back = jax.vjp(
            lambda perturbations: training_rollout(task, world, actor, start, first_steps, perturbations),
            no_perturbations(task, first_steps),
        )
        objective = lambda rollout: _SIDE_BY_SIDE * actor_objective(context, actor_critic, rollout)  # noqa: E731
        (cotangents,) = pull_back(jax.grad(objective)(rollout))
        gradient = jax.vmap(lambda visited, cotangents: actor_gradient(context, actor, visited, cotangents))
        of_states = gradient(by_state(rollout.obs), by_state(cotangents))
        return jax.vmap(lambda one: ravel_pytree(one)[0])(of_states)

    return jnp.stack([one_horizon(horizon) for horizon in horizons], axis=1)


def _beginning(noise: RolloutNoise, horizon: int) -> RolloutNoise:
    steps = jax.tree.map(lambda x: x[:horizon], (noise.step, noise.ends))
    return RolloutNoise(noise.act[: horizon + 1], *steps)


def _tradeoff(horizons: tuple[int, ...], counts: tuple[int, int], batch_size: int, groups: list[Sums]) -> Tradeoff:
    """From the sums of all groups; sums of squares in float64."""
    num_states, num_rollouts = counts
    size = num_states // len(groups)
    stacked: Sums = jax.tree.map(lambda *x: np.stack(x).astype(np.float64), *groups)
    scale = 1.0 / stacked.gradient.shape[-1]

    def figures(chosen: np.ndarray) -> dict[str, np.ndarray]:
        """For some of the groups."""
        count = size * len(chosen)
        mean = stacked.gradient[chosen].sum(0) / count
        square, apart, halves = (
            x[chosen].sum(0) / count for x in (stacked.square, stacked.from_truth, stacked.between_halves)
        )
        truth = mean[-1:]
        between = count / (count - 1) * (square - np.sum(mean**2, axis=-1))  # variance over states
        away = np.sum((mean - truth) ** 2, axis=-1)
        within = halves * num_rollouts / 4  # variance of a single rollout's gradient
        return {
            "bias": square - 2 * np.sum(mean * truth, axis=-1) + np.sum(truth**2),
            "distance": away - (apart - away) / (count - 1),
            "standard_error": np.sqrt(np.maximum(between, 0.0) / count),
            "noise": (between + within * (1 - 1 / num_rollouts)) / batch_size,
        }

    everything = np.arange(len(groups))
    fewer = [figures(np.delete(everything, k)) for k in everything]
    without = np.stack([_error(one["distance"], one["noise"]) for one in fewer])
    powers = {"standard_error": scale}
    scaled = {name: value * powers.get(name, scale**2) for name, value in figures(everything).items()}
    return Tradeoff(horizons, *counts, **scaled, without=without * scale**2)
