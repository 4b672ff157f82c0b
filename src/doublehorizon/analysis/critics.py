"""How fast critics learn the true value with and without distribution rollouts (the paper's section on efficient
critic learning): policy and model stay as they are, critics begin anew, and what they say of pairs of state and action
from the replay is held against returns of real episodes that begin there."""

from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray
from scipy import stats

from doublehorizon.agent import refresh, repeat, replay_as_ring
from doublehorizon.analysis.subject import Subject, as_rows
from doublehorizon.dynamics import imagine_step, survives
from doublehorizon.networks import Critic, ensemble
from doublehorizon.policy import NumpyPolicy
from doublehorizon.records import changed
from doublehorizon.replay import Replay
from doublehorizon.rollouts import Ring, draw_noise, empty_ring, no_nudges, training_rollout
from doublehorizon.seats import Appraisal
from doublehorizon.types import Transition
from doublehorizon.updates import (
    Moments,
    Policy,
    Setting,
    critic_only_update,
    critic_values,
    fresh_moments,
)
from doublehorizon.values import expand_value, unknown_bounds
from doublehorizon.workers import Crew

_PAIRS_AT_ONCE = 4  # that a worker appraises before it reports


@dataclass(frozen=True)
class ErrorCurve:
    """The error over critic updates, `[repeat, point]`."""

    updates: tuple[int, ...]
    errors: np.ndarray

    def mean_and_interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Over repeats, with half the width of the 95% interval."""
        count = len(self.errors)
        half = stats.t.ppf(0.975, count - 1) * stats.sem(self.errors, axis=0) if count > 1 else 0.0 * self.errors[0]
        return self.errors.mean(0), half


@dataclass(frozen=True)
class Trial:
    """How fresh critics learn: from distribution rollouts of so many steps (0: from states of the replay), with so many
    updates in so many repeats, measured each `every` updates with so many imagined rollouts per pair."""

    distribution: int
    updates: int = 2000
    every: int = 100
    repeats: int = 8
    rollouts: int = 16


def horizon_for(discount: float, rest: float = 0.01) -> int:
    """Steps after which what still comes is worth less than this share."""
    return int(np.ceil(np.log(rest) / np.log(discount)))


def true_values(
    crew: Crew, policy: NumpyPolicy, pairs: Transition, how: Appraisal, tick: Callable[[int], None] = lambda n: None
) -> np.ndarray:
    """Mean soft return of real episodes from each pair, found by all workers of the crew side by side. `tick` is told
    how many pairs are done."""
    obs, act = np.asarray(pairs.obs), np.asarray(pairs.act)
    seats = [(seed, 0) for seed in crew.seeds]
    found = np.zeros(len(obs))
    size = _PAIRS_AT_ONCE * len(seats)
    for begin in range(0, len(obs), size):
        shares = {at: np.arange(len(obs))[begin : begin + size][k :: len(seats)] for k, at in enumerate(seats)}
        jobs = {
            at: (int(which[0]), policy, [(obs[i], act[i]) for i in which], how)
            for at, which in shares.items()
            if which.size
        }
        for at, returns in crew.ask("appraise", jobs).items():
            found[shares[at]] = returns.mean(axis=1)
        tick(min(len(obs), begin + size))
    return found


def normalized_error(estimate: Float[Array, " pairs"], truth: Float[Array, " pairs"]) -> Float[Array, ""]:
    """The paper's E: root of the median squared error, relative to the truth."""
    return jnp.sqrt(jnp.median(jnp.square((truth - estimate) / truth)))


def estimate_q(
    setting: Setting, policy: Policy, pairs: Transition, rollouts: int, key: PRNGKeyArray
) -> Float[Array, " pairs"]:
    """What critics are trained towards for these pairs: the value expanded along training rollouts, with the target
    critics behind the last step; the mean over so many rollouts each. There must be a training rollout."""
    config, task, world = setting.config, setting.task, setting.world
    key_first, key_noise, key_critics = jr.split(key, 3)
    temperature = jnp.exp(policy.log_temperature)
    chosen = jnp.argsort(jr.bits(key_critics, (config.critic.members,)))[: config.critic.target_members]

    def least(obs: Float[Array, "rows obs"], act: Float[Array, "rows act"]) -> Float[Array, " rows"]:
        raw = critic_values(policy.target_critics, world.obs_normalizer.normalize(obs), act)
        return policy.bounds.clip(jnp.min(policy.bounds.scale(raw[chosen]), axis=0))

    obs, act = as_rows(pairs.obs, rollouts), as_rows(pairs.act, rollouts)
    first = draw_noise(task, 1, obs.shape[0], key_first)
    step_noise, ends = jax.tree.map(lambda x: x[0], (first.step, first.ends))
    next_obs, reward = imagine_step(task, world, obs, act, step_noise)
    alive = survives(task, world, (obs, act), next_obs, ends)
    noise = draw_noise(task, config.horizons.training - 1, obs.shape[0], key_noise)
    path = training_rollout(task, world, policy.actor, next_obs, noise, no_nudges(task, noise))
    rest = expand_value(path, least(path.obs[-1], path.act[-1]), temperature, config.policy.discount)
    value = reward + config.policy.discount * alive * rest
    return jnp.mean(value.reshape(-1, rollouts), axis=1)


class Learner(eqx.Module):
    """Critics that begin anew, for one repeat."""

    policy: Policy
    moments: Moments
    ring: Ring | None
    key: Key[Array, "*repeat"]


def learn_again(
    subject: Subject, pairs: Transition, truth: np.ndarray, trial: Trial, tick: Callable[[], None] = lambda: None
) -> ErrorCurve:
    """Trains fresh critics and measures their error on the way. Repeats differ in their chance alone."""
    config = changed(subject.config, {"horizons.distribution": trial.distribution})
    rounds = max(1, trial.every // config.policy.refresh_every)
    rollouts = -(-trial.rollouts // config.model.members) * config.model.members
    setting = Setting(config, subject.task, subject.setting.world)
    data = (jnp.asarray(subject.num_rows, jnp.int32), subject.replay)
    question = (pairs, jnp.asarray(truth, jnp.float32))
    learners = _begin(setting, subject.state.policy, jr.split(jr.key(subject.seed), trial.repeats))
    points = [_measure(rollouts, setting, question, learners)]
    every = rounds * config.policy.refresh_every
    for _ in range(-(-trial.updates // every)):
        learners = _advance(rounds, setting, data, learners)
        points.append(_measure(rollouts, setting, question, learners))
        tick()
    steps = tuple(range(0, every * len(points), every))
    return ErrorCurve(steps, np.stack([np.asarray(point) for point in points], axis=1))


@eqx.filter_jit
def _begin(setting: Setting, policy: Policy, keys: Key[Array, " repeat"]) -> Learner:
    config, task = setting.config, setting.task

    def one(key: PRNGKeyArray) -> Learner:
        key, key_critics = jr.split(key)
        sizes = (task.obs_size, task.act_size)
        critics = ensemble(lambda k: Critic(config.critic, *sizes, k), config.critic.members, key_critics)
        fresh = Policy(policy.actor, critics, critics, policy.log_temperature, unknown_bounds())
        room = jnp.zeros((config.policy.ring_capacity, task.obs_size))
        ring = empty_ring(room) if config.horizons.distribution > 0 else None
        return Learner(fresh, fresh_moments(config, fresh), ring, key)

    return jax.vmap(one)(keys)


@eqx.filter_jit
def _advance(rounds: int, setting: Setting, data: tuple[Int[Array, ""], Replay], learners: Learner) -> Learner:
    """So many rounds of a distribution rollout, if there are any, and critic-only updates."""
    config, real = setting.config, replay_as_ring(setting.config, *data)

    def one_round(i: Int[Array, ""], learner: Learner) -> Learner:
        key, key_refresh, key_updates = jr.split(jr.fold_in(learner.key, i), 3)
        ring = None if learner.ring is None else refresh(setting, *data, learner.policy, learner.ring, key_refresh)
        before, count = (learner.policy, learner.moments), config.policy.refresh_every
        after, _ = repeat(critic_only_update, count, setting, ring or real, before, key_updates)
        return Learner(*after, ring, key)

    with jax.default_matmul_precision(config.precision):
        return jax.vmap(lambda learner: jax.lax.fori_loop(0, rounds, one_round, learner))(learners)


@eqx.filter_jit
def _measure(
    rollouts: int, setting: Setting, question: tuple[Transition, Float[Array, " pairs"]], learners: Learner
) -> Float[Array, " repeat"]:
    pairs, truth = question

    def one(learner: Learner) -> Float[Array, ""]:
        estimate = estimate_q(setting, learner.policy, pairs, rollouts, jr.fold_in(learner.key, 2**20))
        return normalized_error(estimate, truth)

    with jax.default_matmul_precision(setting.config.precision):
        return jax.vmap(one)(learners)
