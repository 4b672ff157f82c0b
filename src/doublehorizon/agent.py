"""The algorithm, on one page (the paper's Algorithm 1, one iteration of it).

    collect L steps with the policy             workers, NumPy (`train.py`)
    replay <- those steps                       `store`
    fit the model                               `fit_model`
    critics alone for L/4 updates, then
    L/20 rounds of: DR, 20 joint updates        `improve_policy`

Its relatives have other horizons: without DR updates start from the replay (SVG), without TR they learn from single
steps, imagined (MBPO) or, without a model, real (SAC).

Each of the three is one compiled program over all seeds; nothing crosses between host and device inside them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from doublehorizon import fit as fits
from doublehorizon import replay as replays
from doublehorizon.config import Config, max_epochs, patience
from doublehorizon.devices import over_seeds, program
from doublehorizon.dynamics import World, raw_target
from doublehorizon.networks import Actor, Critic, Dynamics, ensemble
from doublehorizon.normalizer import fit_normalizer, identity
from doublehorizon.replay import Replay
from doublehorizon.rollouts import Ring, distribution_rollout, draw_noise, emptied, empty_ring, push, visited
from doublehorizon.terminator import fit_terminator, untrained
from doublehorizon.types import Effort, Task, Transition, blank_transitions
from doublehorizon.updates import (
    Chance,
    Metrics,
    Moments,
    Policy,
    Setting,
    critic_only_update,
    draw_chance,
    fresh_moments,
    gradient_norm,
    joint_update,
)
from doublehorizon.values import unknown_bounds

_APART = 2**20  # folded into a key that is split as well: what a split gives is the key with 0, 1, ... folded in


class AgentState(eqx.Module):
    """Everything that learning changes, but for the replay."""

    world: World
    policy: Policy
    moments: Moments | None
    """The optimisers' memory, if it lasts for more than an iteration."""
    ring: Ring | None
    """What distribution rollouts have brought; None where there are none."""
    key: Key[Array, "*seed"]


def initial_state(config: Config, task: Task, seed: Int[Array, ""]) -> AgentState:
    """An untrained agent. It depends on its own seed only, however many others are trained beside it."""
    key, key_model, key_critic, key_actor = jr.split(jr.key(seed), 4)
    sizes = (task.obs_size, task.act_size)
    critics = ensemble(lambda k: Critic(config.critic, *sizes, k), config.critic.members, key_critic)
    policy = Policy(
        actor=Actor(config.policy, *sizes, key_actor),
        critics=critics,
        target_critics=jax.tree.map(jnp.copy, critics),
        log_temperature=jnp.asarray(math.log(config.policy.initial_temperature), jnp.float32),
        bounds=unknown_bounds(),
    )
    learns_ends = task.learns_termination and config.has_model
    return AgentState(
        world=World(
            ensemble(lambda k: Dynamics(config.model, *sizes, k), config.model.members, key_model),
            identity(task.obs_size),
            identity(1 + task.obs_size),
            untrained(config.terminator, *sizes, jr.fold_in(key_model, _APART)) if learns_ends else None,
        ),
        policy=policy,
        moments=fresh_moments(config, policy) if config.policy.keep_moments else None,
        ring=_empty_ring(config, task) if config.horizons.distribution > 0 else None,
        key=key,
    )


def _empty_ring(config: Config, task: Task) -> Ring:
    """For states to start training rollouts from; without these, for whole steps."""
    capacity = config.policy.ring_capacity
    if config.horizons.training > 0:
        return empty_ring(jnp.zeros((capacity, task.obs_size)))
    return empty_ring(blank_transitions(capacity, task.obs_size, task.act_size))


def learn_termination(config: Config, task: Task, state: AgentState) -> AgentState:
    """The same agent, from now on learning when episodes end. All seeds: arrays have a leading seed axis."""
    if not config.has_model:  # what really ended is all that it learns from
        return state
    add = lambda key: untrained(config.terminator, task.obs_size, task.act_size, jr.fold_in(key, _APART))  # noqa: E731
    terminator = eqx.filter_jit(lambda keys: over_seeds(jax.vmap(add), keys))(state.key)
    return eqx.tree_at(lambda s: s.world.terminator, state, terminator, is_leaf=lambda x: x is None)


class Plan(NamedTuple):
    """An `Effort` in plain numbers."""

    num_rows: int
    fit_batches: int
    patience: int
    max_epochs: int
    end_batches: int
    num_rounds: int

    def effort(self) -> Effort:
        return Effort(*(jnp.asarray(n, jnp.int32) for n in self))


def plan(config: Config, task: Task, num_rows: int, steps: int, first: bool) -> Plan:
    """How much an iteration of `steps` steps works, with `num_rows` transitions stored; the first works more."""
    factor = config.fit.first_effort if first else 1.0
    num_training = replays.num_training(num_rows, config.fit.held_out_every)
    batches = min(config.fit.batches_per_epoch, max(1, num_training // config.fit.batch_size))
    rounds = round(factor * steps * config.policy.updates_per_step / config.policy.refresh_every)
    epochs = max_epochs(config, task.obs_size, factor)
    if config.fit.batches_factor is not None:
        epochs = min(epochs, round(config.fit.batches_factor * epochs / batches))
    end_batches = round(factor * config.terminator.batches)
    return Plan(num_rows, batches, patience(config, task.obs_size, factor), epochs, end_batches, max(1, rounds))


# -- the three programs: arrays have a leading seed axis ---------------------------------------------------


@program(donate="all-except-first")
def store(inputs: tuple[Transition, AgentState], replay: Replay) -> tuple[Replay, AgentState]:
    """Adds each seed's new transitions to its replay, whose memory is reused; states are never changed in place, so
    that a run can go back to an earlier one."""
    rows, state = inputs

    def add(replay: Replay, state: AgentState, rows: Transition) -> tuple[Replay, AgentState]:
        key, key_store = _split(state.key)
        return jax.vmap(replays.add)(replay, rows, key_store), eqx.tree_at(lambda s: s.key, state, key)

    return over_seeds(add, replay, state, rows)


@program(donate="none")
def fit_model(inputs: tuple[Config, Effort, Replay], state: AgentState) -> tuple[AgentState, dict[str, Array]]:
    """Takes fresh statistics of the replay, then fits every seed's model, if there is one, to it."""
    config, effort, replay = inputs

    def fit(replay: Replay, state: AgentState) -> tuple[AgentState, dict[str, Array]]:
        key, key_fit = _split(state.key)
        world = jax.vmap(lambda w, r: _with_statistics(w, r, effort.num_rows))(state.world, replay)
        metrics: dict[str, Array] = {}
        if config.has_model:
            world, metrics = fits.fit(config, effort, replay, world, key_fit)
        if world.terminator is not None:
            fit_ends = lambda *seed: fit_terminator(config.terminator, effort, *seed)  # noqa: E731
            seeded = (
                world.terminator,
                world.obs_normalizer,
                replay,
                jax.vmap(lambda k: jr.fold_in(k, _APART))(key_fit),
            )
            terminator, calibration = jax.vmap(fit_ends)(*seeded)
            world, metrics = eqx.tree_at(lambda w: w.terminator, world, terminator), metrics | calibration
        return AgentState(world, state.policy, state.moments, state.ring, key), metrics

    with jax.default_matmul_precision(config.precision):
        return over_seeds(fit, replay, state)


@program(donate="none")
def improve_policy(inputs: tuple[Config, Task, int, Effort, Replay], state: AgentState) -> tuple[AgentState, Metrics]:
    """Optimises every seed's policy inside its model."""
    config, task, steps, effort, replay = inputs
    improve = jax.vmap(lambda state, replay: _improve_policy(config, task, steps, effort, replay, state))
    with jax.default_matmul_precision(config.precision):
        return over_seeds(improve, state, replay)


# -- for one seed ------------------------------------------------------------------------------------------


def _improve_policy(
    config: Config, task: Task, steps: int, effort: Effort, replay: Replay, state: AgentState
) -> tuple[AgentState, Metrics]:
    """Critics alone at first, as the model under them has just changed; then rounds of DR and joint updates. The
    metrics are means over the last round."""
    key, key_first, key_critics, key_rounds = jr.split(state.key, 4)
    setting = Setting(config, task, state.world.as_multiplied())
    real = replay_as_ring(config, effort.num_rows, replay)

    def refreshed(policy: Policy, ring: Ring | None, key: PRNGKeyArray) -> Ring | None:
        return None if ring is None else refresh(setting, effort.num_rows, replay, policy, ring, key)

    ring = state.ring if state.ring is None or not config.policy.clear_each_iteration else emptied(state.ring)
    ring = refreshed(state.policy, ring, key_first)
    num_critic_updates = round(steps * config.policy.critic_only_share)
    learner = (state.policy, state.moments or fresh_moments(config, state.policy))
    learner, _ = repeat(critic_only_update, num_critic_updates, setting, ring or real, learner, key_critics)

    def one_round(i, carry):
        (policy, moments), ring, _ = carry
        key_refresh, key_updates = jr.split(jr.fold_in(key_rounds, i))
        ring = refreshed(policy, ring, key_refresh)
        num_updates = config.policy.refresh_every
        learner, metrics = repeat(joint_update, num_updates, setting, ring or real, (policy, moments), key_updates)
        metrics = {name: jnp.mean(value) for name, value in metrics.items()}
        return learner, ring, metrics | {"train/actor_gradient_norm": gradient_norm(learner[1])}

    shapes = jax.eval_shape(lambda: one_round(0, (learner, ring, None))[-1])
    no_metrics = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    carry = jax.lax.fori_loop(0, effort.num_rounds, one_round, (learner, ring, no_metrics))
    (policy, moments), ring, metrics = carry
    return AgentState(state.world, policy, moments if config.policy.keep_moments else None, ring, key), metrics


def replay_as_ring(config: Config, num_rows: int | Int[Array, ""], replay: Replay) -> Ring:
    """The replay in place of a ring: what was really seen, or done where steps are learnt from."""
    rows = replay.rows.obs if config.horizons.training > 0 else replay.rows
    return Ring(rows, replay.position, jnp.asarray(num_rows, jnp.int32))


def refresh(
    setting: Setting, num_rows: Int[Array, ""], replay: Replay, policy: Policy, ring: Ring, key: PRNGKeyArray
) -> Ring:
    """A distribution rollout from states of the replay into the ring."""
    key_starts, key_noise = jr.split(key)
    horizon, batch = setting.config.horizons.distribution, setting.config.distribution_rows
    starts = replay.rows.obs[jr.randint(key_starts, (horizon + 1, batch), 0, num_rows)]
    noise = draw_noise(setting.task, horizon, batch, key_noise)
    steps, last = distribution_rollout(setting.task, setting.world, policy.actor, starts, noise)
    kept = visited(steps, last) if setting.config.horizons.training > 0 else steps
    return push(ring, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept))


def repeat(
    update: Callable[[Setting, Policy, Moments, Chance], tuple[Policy, Moments, Metrics]],
    count: int,
    setting: Setting,
    ring: Ring,
    learner: tuple[Policy, Moments],
    key: PRNGKeyArray,
) -> tuple[tuple[Policy, Moments], dict[str, Float[Array, " count"]]]:
    """So many updates, one after the other, all from states of one ring."""

    def body(learner, chance):
        policy, moments, metrics = update(setting, learner[0], learner[1], chance)
        return (policy, moments), metrics

    chances = jax.vmap(lambda key: draw_chance(setting, ring, key))(jr.split(key, count))
    return jax.lax.scan(body, learner, chances)


def _with_statistics(world: World, replay: Replay, num_rows: Int[Array, ""]) -> World:
    rows = replay.rows
    return World(
        world.members,
        fit_normalizer(rows.obs, num_rows),
        fit_normalizer(raw_target(rows.obs, rows.reward, rows.next_obs), num_rows),
        world.terminator,
    )


def _split(keys: Key[Array, " seed"]) -> tuple[Key[Array, " seed"], Key[Array, " seed"]]:
    """Splits every seed's key in two."""
    first, second = jnp.unstack(jax.vmap(jr.split)(keys), axis=1)
    return first, second
