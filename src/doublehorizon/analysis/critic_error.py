"""How fast critics learn the true value with and without distribution rollouts (the paper's section on efficient
critic learning): policy and model stay as they are, critics begin anew, and their values of pairs of state and action
from the replay are compared with Monte Carlo returns of real episodes that begin there."""

from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from doublehorizon.acting.env_runner import MonteCarloSpec
from doublehorizon.acting.policy import NumpyPolicy
from doublehorizon.acting.workers import WorkerPool
from doublehorizon.algorithm.actor_critic import ActorCritic, untrained_critics
from doublehorizon.algorithm.agent import refresh, repeat
from doublehorizon.algorithm.ensemble import even_shares
from doublehorizon.algorithm.model_buffer import ModelBuffer
from doublehorizon.algorithm.replay_buffer import ReplayBuffer
from doublehorizon.algorithm.rollouts import draw_noise, no_perturbations, training_rollout
from doublehorizon.algorithm.start_states import empty_model_buffer, start_states
from doublehorizon.algorithm.types import Rollout, Transition
from doublehorizon.algorithm.updates import (
    OptStates,
    UpdateContext,
    critic_only_update,
    critic_target,
    fresh_opt_states,
    target_indices,
)
from doublehorizon.algorithm.values import unknown_bounds
from doublehorizon.algorithm.world_model import imagine_end, imagine_step
from doublehorizon.analysis.curves import mean_and_half_width
from doublehorizon.analysis.loaded_seed import LoadedSeed, as_rows
from doublehorizon.config_json import changed

_PAIRS_AT_ONCE = 4  # whose values a worker estimates before it reports


@dataclass(frozen=True)
class ErrorCurve:
    """The error over critic updates, `[repeat, point]`."""

    updates: tuple[int, ...]
    errors: np.ndarray

    def mean_and_interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Over repeats, with half the width of the 95% interval."""
        return mean_and_half_width(self.errors)


@dataclass(frozen=True)
class Trial:
    """How fresh critics learn: from distribution rollouts of `distribution` steps (0: from states of the replay), their
    error measured each `every` updates with `rollouts` imagined rollouts per pair."""

    distribution: int
    updates: int = 2000
    every: int = 100
    repeats: int = 8
    rollouts: int = 16


def horizon_for(discount: float, rest: float = 0.01) -> int:
    """Steps after which what still comes is worth less than this share."""
    return int(np.ceil(np.log(rest) / np.log(discount)))


def true_values(
    pool: WorkerPool,
    policy: NumpyPolicy,
    pairs: Transition,
    spec: MonteCarloSpec,
    tick: Callable[[int], None] = lambda n: None,
) -> np.ndarray:
    """Mean soft return of real episodes from each pair, estimated by all workers of the pool side by side. `tick` is
    called with the number of pairs that are done."""
    obs, act = np.asarray(pairs.obs), np.asarray(pairs.act)
    runners = [(seed, 0) for seed in pool.seeds]
    found = np.zeros(len(obs))
    size = _PAIRS_AT_ONCE * len(runners)
    for begin in range(0, len(obs), size):
        indices = np.arange(len(obs))[begin : begin + size]
        shares = {at: indices[k :: len(runners)] for k, at in enumerate(runners)}
        arguments = {
            at: (int(which[0]), policy, [(obs[i], act[i]) for i in which], spec)
            for at, which in shares.items()
            if which.size
        }
        for at, returns in pool.call("monte_carlo_returns", arguments).items():
            found[shares[at]] = returns.mean(axis=1)
        tick(min(len(obs), begin + size))
    return found


def normalized_error(estimate: Float[Array, " pairs"], truth: Float[Array, " pairs"]) -> Float[Array, ""]:
    """The paper's E: root of the median squared error, relative to the truth."""
    return jnp.sqrt(jnp.median(jnp.square((truth - estimate) / truth)))


def estimate_q(
    context: UpdateContext, actor_critic: ActorCritic, pairs: Transition, rollouts: int, key: PRNGKeyArray
) -> Float[Array, " pairs"]:
    """What critics are trained towards for these pairs, as the mean over `rollouts` training rollouts each. There must
    be a training rollout."""
    config, task, world = context.config, context.task, context.world
    key_first, key_noise, key_critics = jr.split(key, 3)
    chosen = target_indices(context, key_critics)
    obs, act = as_rows(pairs.obs, rollouts), as_rows(pairs.act, rollouts)
    first = draw_noise(task, 1, obs.shape[0], key_first, context.rollout_noise)
    step_noise, ends = jax.tree.map(lambda x: x[0], (first.step, first.ends))
    next_obs, going_reward = imagine_step(task, world, obs, act, step_noise)
    goes_on, reward = imagine_end(task, world, (obs, act), next_obs, going_reward, ends)
    noise = draw_noise(task, config.horizons.training - 1, obs.shape[0], key_noise, context.rollout_noise)
    rest = training_rollout(task, world, actor_critic.actor, next_obs, noise, no_perturbations(task, noise))
    rollout = Rollout(
        obs=jnp.concatenate([obs[None], rest.obs]),
        act=jnp.concatenate([act[None], rest.act]),
        log_prob=jnp.concatenate([jnp.zeros_like(reward)[None], rest.log_prob]),  # of a given action: no bonus
        reward=jnp.concatenate([reward[None], rest.reward]),
        going_reward=jnp.concatenate([going_reward[None], rest.going_reward]),
        alive=jnp.concatenate([jnp.ones_like(reward)[None], goes_on[None] * rest.alive]),
    )
    value = critic_target(context, actor_critic, rollout, chosen)
    return jnp.mean(value.reshape(-1, rollouts), axis=1)


class Learner(eqx.Module):
    """Critics that begin anew, for one repeat."""

    actor_critic: ActorCritic
    opt_states: OptStates
    model_buffer: ModelBuffer | None
    key: Key[Array, "*repeat"]


def learn_again(
    loaded: LoadedSeed, pairs: Transition, truth: np.ndarray, trial: Trial, tick: Callable[[], None] = lambda: None
) -> ErrorCurve:
    """Trains fresh critics and measures their error on the way. Repeats differ in their random numbers alone."""
    config = changed(loaded.config, {"horizons.distribution": trial.distribution})
    rounds = max(1, trial.every // config.policy.refresh_every)
    rollouts = even_shares(trial.rollouts, config.model.members)
    context = UpdateContext(config, loaded.task, loaded.context.world)
    data = (jnp.asarray(loaded.num_rows, jnp.int32), loaded.replay)
    question = (pairs, jnp.asarray(truth, jnp.float32))
    learners = _begin(context, loaded.state.actor_critic, jr.split(jr.key(loaded.seed), trial.repeats))
    points = [_measure(rollouts, context, question, learners)]
    every = rounds * config.policy.refresh_every
    for _ in range(-(-trial.updates // every)):
        learners = _advance(rounds, context, data, learners)
        points.append(_measure(rollouts, context, question, learners))
        tick()
    steps = tuple(range(0, every * len(points), every))
    return ErrorCurve(steps, np.stack([np.asarray(point) for point in points], axis=1))


@eqx.filter_jit
def _begin(context: UpdateContext, trained: ActorCritic, keys: Key[Array, " repeat"]) -> Learner:
    config, task = context.config, context.task

    def one(key: PRNGKeyArray) -> Learner:
        key, key_critics = jr.split(key)
        critics = untrained_critics(config, task, key_critics)
        fresh = ActorCritic(trained.actor, critics, critics, trained.log_temperature, unknown_bounds())
        return Learner(fresh, fresh_opt_states(config, fresh), empty_model_buffer(config, task), key)

    return jax.vmap(one)(keys)


@eqx.filter_jit
def _advance(
    rounds: int, context: UpdateContext, data: tuple[Int[Array, ""], ReplayBuffer], learners: Learner
) -> Learner:
    """`rounds` rounds of a distribution rollout, if there are any, and critic-only updates."""
    config = context.config

    def one_round(i: Int[Array, ""], learner: Learner) -> Learner:
        key, key_refresh, key_updates = jr.split(jr.fold_in(learner.key, i), 3)
        buffer = refresh(context, *data, learner.actor_critic, learner.model_buffer, key_refresh)
        starts, before = start_states(config, *data, buffer), (learner.actor_critic, learner.opt_states)
        after, _ = repeat(critic_only_update, config.policy.refresh_every, context, starts, before, key_updates)
        return Learner(*after, buffer, key)

    with jax.default_matmul_precision(config.precision):
        return jax.vmap(lambda learner: jax.lax.fori_loop(0, rounds, one_round, learner))(learners)


@eqx.filter_jit
def _measure(
    rollouts: int, context: UpdateContext, question: tuple[Transition, Float[Array, " pairs"]], learners: Learner
) -> Float[Array, " repeat"]:
    pairs, truth = question

    def one(learner: Learner) -> Float[Array, ""]:
        estimate = estimate_q(context, learner.actor_critic, pairs, rollouts, jr.fold_in(learner.key, 2**20))
        return normalized_error(estimate, truth)

    with jax.default_matmul_precision(context.config.precision):
        return jax.vmap(one)(learners)
