"""How good a run's model is: one step ahead on data that it was fitted to, that was held out, and that came later; and
many steps ahead, along real trajectories, without looking at them on the way."""

from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray
from scipy import stats

from doublehorizon.algorithm import agent
from doublehorizon.algorithm import replay_buffer as replays
from doublehorizon.algorithm.ensemble import even_shares
from doublehorizon.algorithm.model_fit import as_one_gaussian
from doublehorizon.algorithm.replay_buffer import ReplayBuffer
from doublehorizon.algorithm.rollouts import draw_noise
from doublehorizon.algorithm.types import Task, Transition
from doublehorizon.algorithm.world_model import WorldModel, imagine_step, raw_target
from doublehorizon.analysis.loaded_seed import LoadedSeed, as_rows
from doublehorizon.config import Config
from doublehorizon.errors import UserError

LEVELS = (0.5, 0.8, 0.95)
_ROWS_AT_ONCE = 2048
_CONSTANT = 1e-4  # a deviation below this is none, as in normalizer.py


@dataclass(frozen=True)
class Accuracy:
    """One step ahead on some rows: of the reward and of each change of the observation, in their own units."""

    rows: int
    rmse: tuple[float, ...]
    relative: tuple[float, ...]
    """The same, divided by the standard deviation of what is predicted: 1 is as bad as predicting its mean. 0 where
    that never changes."""
    coverage: dict[float, float]
    """Share of numbers within the model's own interval of each level; equal to the level if the model knows what it
    does not know."""

    @property
    def total(self) -> float:
        """Of all numbers together."""
        return float(np.sqrt(np.mean(np.square(self.rmse))))

    @property
    def total_relative(self) -> float:
        return float(np.sqrt(np.mean(np.square(self.relative))))


@dataclass(frozen=True)
class OpenLoop:
    """Along real trajectories: the mean prediction's error, in standard deviations of the observation, after each
    number of steps; beside it, how unsure the model was, and the error of predicting that nothing changes."""

    trajectories: int
    error: tuple[float, ...]
    spread: tuple[float, ...]
    standing_still: tuple[float, ...]


def accuracy(config: Config, world: WorldModel, rows: Transition) -> Accuracy:
    """Compares the ensemble, taken as one Gaussian, with rows that really happened. Rewards of steps that ended an
    episode do not count where the termination model is what learns them."""
    parts = []
    count = rows.reward.shape[0]
    for begin in range(0, count, _ROWS_AT_ONCE):
        at = np.arange(begin, begin + _ROWS_AT_ONCE) % count  # the last part is filled up, and cut off again
        errors, deviations = _predict(world, jax.tree.map(lambda x, at=at: x[at], rows))
        kept = min(_ROWS_AT_ONCE, count - begin)
        parts.append((np.asarray(errors)[:kept], np.asarray(deviations)[:kept]))
    error, deviation = (np.concatenate(x).astype(np.float64) for x in zip(*parts, strict=True))
    target = np.asarray(raw_target(rows.obs, rows.reward, rows.next_obs), np.float64)
    counted = np.ones(error.shape, bool)
    if world.learns_end_rewards(config):
        counted[:, 0] = np.asarray(rows.terminated) == 0
    rmse = np.sqrt(np.mean(error**2, axis=0, where=counted))
    within = {
        level: float(np.mean(np.abs(error) <= stats.norm.ppf(0.5 + level / 2) * deviation, where=counted))
        for level in LEVELS
    }
    std = target.std(0, where=counted)
    relative = np.where(std > _CONSTANT, rmse / np.maximum(std, _CONSTANT), 0.0)
    return Accuracy(count, tuple(rmse.tolist()), tuple(relative.tolist()), within)


@eqx.filter_jit
def _predict(world: WorldModel, rows: Transition) -> tuple[Float[Array, "rows target"], Float[Array, "rows target"]]:
    """The ensemble's errors, and the deviations it claims: its noise and its members' disagreement."""
    inputs = jnp.concatenate([world.obs_normalizer.normalize(rows.obs), rows.act], axis=-1)
    means, log_noise = eqx.filter_vmap(lambda member: member(inputs))(world.members)
    middle, variance = as_one_gaussian(means, log_noise)
    deviation = jnp.sqrt(variance) * world.target_normalizer.std[None]
    predicted = world.target_normalizer.denormalize(middle)
    return predicted - raw_target(rows.obs, rows.reward, rows.next_obs), deviation


def split(loaded: LoadedSeed, num_rows: int, most: int) -> dict[str, Transition]:
    """Rows that fits learn from and held-out rows, if there are any, among the first `num_rows`; evenly spread, `most`
    of each."""

    def spread(available: int) -> Int[Array, " n"]:
        return jnp.asarray(np.unique(np.linspace(0, available - 1, min(available, most)).round().astype(np.int32)))

    if loaded.config.fit.batches_per_step is not None:  # nothing is held out
        return {"training": replays.take(loaded.replay, spread(num_rows))[0]}
    every = loaded.config.fit.held_out_every
    training = replays.training_rows(loaded.replay, spread(replays.num_training(num_rows, every)))
    held_out = replays.validation_rows(loaded.replay, spread(num_rows // every))
    return {
        "training": replays.take(loaded.replay, training)[0],
        "held out": replays.take(loaded.replay, held_out)[0],
    }


def later(loaded: LoadedSeed, after: int, most: int) -> Transition | None:
    """The rows after row number `after`; None if there are none, or the ring has begun to overwrite them."""
    count = min(most, loaded.num_rows - after)
    if count < 1 or (loaded.num_rows == loaded.replay.rows.reward.shape[0] and int(loaded.replay.position) > 0):
        return None
    return jax.tree.map(lambda x: x[loaded.num_rows - count : loaded.num_rows], loaded.replay.rows)


def refitted(loaded: LoadedSeed, num_rows: int) -> WorldModel:
    """A fresh model, fitted to the first rows alone as a run's first fit is."""
    if not 2 * loaded.config.fit.held_out_every <= num_rows <= loaded.num_rows:
        raise UserError(f"a fit to {num_rows} rows was asked for, but the run has {loaded.num_rows}.")
    config, task = loaded.config, loaded.task
    num_rows -= num_rows % config.fit.held_out_every
    # as many minibatches as there are rows, or the epochs of a run's first fit
    effort = 1.0 if config.fit.batches_per_step is not None else loaded.first_effort
    budget = agent.iteration_budget(config, task, num_rows, num_rows, effort).traced()
    state = jax.tree.map(lambda x: x[None], agent.initial_state(config, task, jnp.asarray(loaded.seed)))
    first_rows = replays.rewound(loaded.replay, num_rows)  # the newest rows are the newest of these
    replay: ReplayBuffer = jax.tree.map(lambda x: x[None], first_rows)
    fitted, _ = agent.fit_model(config, budget, replay, state)
    return jax.tree.map(lambda x: x[0], fitted.world)


def trajectories(rows: Transition, num_rows: int, horizon: int, most: int, seed: int) -> np.ndarray:
    """First rows of stretches of `horizon` rows in which each begins where the one before ended, `[trajectory]`."""
    obs, next_obs = (np.asarray(x[:num_rows]) for x in (rows.obs, rows.next_obs))
    ended = np.asarray(rows.terminated[:num_rows]) > 0
    linked = np.append(np.all(next_obs[:-1] == obs[1:], axis=1) & ~ended[:-1], False)
    run = np.convolve(linked, np.ones(horizon - 1), "valid") if horizon > 1 else np.ones(num_rows)
    starts = np.flatnonzero(run[: num_rows - horizon + 1] == max(0, horizon - 1))
    if starts.size == 0:
        raise UserError(f"no stretch of {horizon} steps without an end is in the replay. Ask for a shorter horizon.")
    return np.sort(np.random.default_rng(seed).permutation(starts)[:most])


def open_loop(
    loaded: LoadedSeed,
    starts: np.ndarray,
    horizon: int,
    particles: int,
    key: PRNGKeyArray,
    tick: Callable[[], None] = lambda: None,
) -> OpenLoop:
    """Repeats the actions of real trajectories in the model, with `particles` imagined ones beside each."""
    particles = even_shares(particles, loaded.config.model.members)
    rows, world = loaded.replay.rows, loaded.context.world
    at = starts[None] + np.arange(horizon)[:, None]
    real, acts = rows.next_obs[at], rows.act[at]
    std = world.obs_normalizer.std[None]
    now = as_rows(rows.obs[starts], particles)
    found = []
    for t in range(horizon):
        now, mean, spread = _follow(loaded.task, world, now, acts[t], jr.fold_in(key, t))
        off = [(mean - real[t]) / std, spread / std, (rows.obs[starts] - real[t]) / std]
        found.append([float(jnp.sqrt(jnp.mean(jnp.square(x)))) for x in off])
        tick()
    return OpenLoop(len(starts), *(tuple(column) for column in np.transpose(found).tolist()))


@eqx.filter_jit
def _follow(
    task: Task, world: WorldModel, now: Float[Array, "rows obs"], act: Float[Array, "trajectory act"], key: PRNGKeyArray
) -> tuple[Float[Array, "rows obs"], Float[Array, "trajectory obs"], Float[Array, "trajectory obs"]]:
    """One step of all imagined trajectories; their mean and their deviation beside each real one."""
    noise = jax.tree.map(lambda x: x[0], draw_noise(task, 1, now.shape[0], key).step)
    particles = now.shape[0] // act.shape[0]
    after, _ = imagine_step(task, world, now, as_rows(act, particles), noise)
    beside = after.reshape(act.shape[0], particles, -1)
    return after, jnp.mean(beside, axis=1), jnp.std(beside, axis=1)
