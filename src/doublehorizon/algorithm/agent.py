"""The algorithm, on one page (the paper's Algorithm 1, one iteration of it).

    collect L steps with the policy             workers, NumPy (`training/train.py`)
    replay <- those steps                       `store`
    fit the model                               `fit_model`
    critics alone for L/4 updates, then
    L/20 rounds of: DR, 20 joint updates        `improve_policy`

Its ablations have other horizons: without DR updates start from the replay, without TR they learn from single steps,
imagined ones or, without a model, real ones (SAC).

Each of the three is one compiled program over all seeds; nothing crosses between host and device inside them.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from doublehorizon.algorithm import early_stopping, model_buffer, model_fit
from doublehorizon.algorithm import replay_buffer as replays
from doublehorizon.algorithm.actor_critic import ActorCritic, reach_ends, untrained_actor_critic
from doublehorizon.algorithm.devices import over_seeds, program
from doublehorizon.algorithm.end_rewards import fit_end_rewards, unknown_end_rewards
from doublehorizon.algorithm.ensemble import ensemble
from doublehorizon.algorithm.model_buffer import ModelBuffer
from doublehorizon.algorithm.networks import Dynamics
from doublehorizon.algorithm.normalizer import fit_changes, fit_observations, fit_rewards, identity
from doublehorizon.algorithm.replay_buffer import ReplayBuffer
from doublehorizon.algorithm.rollouts import distribution_rollout, draw_noise
from doublehorizon.algorithm.start_states import StartStates, empty_model_buffer, kept_rows, start_states
from doublehorizon.algorithm.termination_model import fit_termination_model, untrained_termination_model
from doublehorizon.algorithm.types import Budget, Task, Transition
from doublehorizon.algorithm.updates import (
    Metrics,
    OptStates,
    UpdateContext,
    UpdateInputs,
    actor_gradient_norm,
    critic_only_update,
    draw_inputs,
    fresh_opt_states,
    joint_update,
)
from doublehorizon.algorithm.world_model import WorldModel
from doublehorizon.config import Config
from doublehorizon.schedule import max_epochs, patience


class AgentState(eqx.Module):
    """Everything that learning changes, but for the replay."""

    world: WorldModel
    actor_critic: ActorCritic
    opt_states: OptStates | None
    """Adam's states, if they last for more than an iteration."""
    model_buffer: ModelBuffer | None
    """What distribution rollouts have brought; None where there are none."""
    key: Key[Array, "*seed"]


def initial_state(config: Config, task: Task, seed: Int[Array, ""]) -> AgentState:
    """An untrained agent. It depends on its own seed only, however many others are trained beside it."""
    key, key_model, key_critic, key_actor, key_termination = jr.split(jr.key(seed), 5)
    sizes = (task.obs_size, task.act_size)
    actor_critic = untrained_actor_critic(config, task, key_actor, key_critic)
    termination_model = None
    if _models_ends(config, task):
        termination_model = untrained_termination_model(config.terminator, *sizes, key_termination)
    return AgentState(
        world=WorldModel(
            ensemble(lambda k: Dynamics(config.model, *sizes, k), config.model.members, key_model),
            identity(task.obs_size),
            identity(1 + task.obs_size),
            termination_model,
            unknown_end_rewards() if task.can_end and _counts_ends(config) else None,
        ),
        actor_critic=actor_critic,
        opt_states=fresh_opt_states(config, actor_critic) if config.policy.keep_moments else None,
        model_buffer=empty_model_buffer(config, task),
        key=key,
    )


def learn_termination(config: Config, task: Task, state: AgentState) -> AgentState:
    """The same agent, from now on learning when episodes end. All seeds: arrays have a leading seed axis."""
    if not config.has_model:  # what really ended is all that it learns from
        return state

    def untrained(keys: Key[Array, " seed"]) -> tuple:
        keys, keys_termination = _split(keys)

        def make(key: PRNGKeyArray) -> tuple:
            model = untrained_termination_model(config.terminator, task.obs_size, task.act_size, key)
            return model, unknown_end_rewards() if _counts_ends(config) else None

        return keys, *jax.vmap(make)(keys_termination)

    learnt = eqx.filter_jit(lambda keys: over_seeds(untrained, keys))(state.key)
    where = lambda s: (s.key, s.world.termination_model, s.world.end_rewards)  # noqa: E731
    return eqx.tree_at(where, state, learnt, is_leaf=lambda x: x is None)


def with_fresh_keys(state: AgentState) -> AgentState:
    """The same agent with other keys, for another try at an iteration. All seeds. The fourth key of a split is one that
    `fit_model`, which takes three, leaves unused."""
    return eqx.tree_at(lambda s: s.key, state, _split(state.key, 4)[3])


def iteration_budget(
    config: Config, task: Task, num_rows: int, steps: int, first_effort: float | None = None
) -> Budget:
    """How much an iteration of `steps` steps works, with `num_rows` transitions stored. The first that learns has a
    `first_effort`, the factor by which it works more."""
    effort = first_effort or 1.0
    batches, epochs = _fit_batches_and_epochs(config, task, num_rows, steps, effort)
    rounds = round(effort * steps * config.policy.updates_per_step / config.policy.refresh_every)
    return Budget(
        num_rows=num_rows,
        num_new=steps if first_effort is None else num_rows,
        fit_batches=batches,
        patience=patience(config, task.obs_size, effort),
        max_epochs=epochs,
        termination_batches=round(effort * config.terminator.batches),
        num_rounds=max(1, rounds),
    )


def _fit_batches_and_epochs(config: Config, task: Task, num_rows: int, steps: int, effort: float) -> tuple[int, int]:
    """Minibatches of an epoch, and how many epochs there are at most."""
    fit = config.fit
    if fit.batches_per_step is not None:
        return fit.batches_per_epoch, max(1, round(effort * steps * fit.batches_per_step / fit.batches_per_epoch))
    num_training = replays.num_training(num_rows, fit.held_out_every)
    batches = min(fit.batches_per_epoch, max(1, num_training // fit.batch_size))
    epochs = max_epochs(config, task.obs_size, effort)
    if fit.batches_factor is not None:
        epochs = min(epochs, round(fit.batches_factor * epochs / batches))
    return batches, epochs


# -- the programs: arrays have a leading seed axis ----------------------------------------------------------


@eqx.filter_jit
def untrained(config: Config, task: Task, capacity: int, seeds: Int[Array, " seed"]) -> tuple[AgentState, ReplayBuffer]:
    """Each seed's untrained agent and empty replay."""

    def one_seed(seed: Int[Array, ""]) -> tuple[AgentState, ReplayBuffer]:
        sizes = (task.obs_size, task.act_size, config.model.members, config.fit.held_out_every)
        return initial_state(config, task, seed), replays.empty(capacity, *sizes)

    return over_seeds(jax.vmap(one_seed), seeds)


@program(donate="all-except-first")
def store(inputs: tuple[Transition, AgentState], replay: ReplayBuffer) -> tuple[ReplayBuffer, AgentState]:
    """Adds each seed's new transitions to its replay, whose memory is reused; states are never changed in place, so
    that a run can go back to an earlier one."""
    rows, state = inputs

    def add(replay: ReplayBuffer, state: AgentState, rows: Transition) -> tuple[ReplayBuffer, AgentState]:
        key, key_store = _split(state.key)
        return jax.vmap(replays.add)(replay, rows, key_store), eqx.tree_at(lambda s: s.key, state, key)

    return over_seeds(add, replay, state, rows)


@program(donate="none")
def fit_model(
    config: Config, budget: Budget, replay: ReplayBuffer, state: AgentState
) -> tuple[AgentState, dict[str, Array]]:
    """Takes fresh statistics of the replay, then fits every seed's model, if there is one, to it."""

    def fit(replay: ReplayBuffer, state: AgentState) -> tuple[AgentState, dict[str, Array]]:
        key, key_fit, key_termination = _split(state.key, 3)
        world = jax.vmap(lambda w, r: _with_statistics(config, w, r, budget.num_rows))(state.world, replay)
        metrics: dict[str, Array] = {}
        holds_out = config.fit.batches_per_step is None
        if config.has_model:
            fit_members = early_stopping.fit if holds_out else model_fit.fit
            world, metrics = fit_members(config, budget, replay, world, key_fit)
        if world.termination_model is not None:
            fit_ends = jax.vmap(lambda *seed: fit_termination_model(config.terminator, holds_out, budget, *seed))
            known = (world.termination_model, world.obs_normalizer, world.end_rewards)
            model, calibration = fit_ends(*known, replay, key_termination)
            world, metrics = eqx.tree_at(lambda w: w.termination_model, world, model), metrics | calibration
        return eqx.tree_at(lambda s: (s.world, s.key), state, (world, key)), metrics

    with jax.default_matmul_precision(config.precision):
        return over_seeds(fit, replay, state)


@program(donate="none")
def improve_policy(
    config: Config, task: Task, steps: int, budget: Budget, replay: ReplayBuffer, state: AgentState
) -> tuple[AgentState, Metrics]:
    """Optimises every seed's policy inside its model."""
    improve = jax.vmap(lambda state, replay: _improve_policy(config, task, steps, budget, replay, state))
    with jax.default_matmul_precision(config.precision):
        return over_seeds(improve, state, replay)


# -- for one seed ------------------------------------------------------------------------------------------


def _improve_policy(
    config: Config, task: Task, steps: int, budget: Budget, replay: ReplayBuffer, state: AgentState
) -> tuple[AgentState, Metrics]:
    """Critics alone at first, as the model under them has just changed; then rounds of DR and joint updates. The
    metrics are means over the last round."""
    key, key_first, key_critics, key_rounds = jr.split(state.key, 4)
    context = UpdateContext(config, task, state.world.in_storage_dtype())
    num_rows = jnp.asarray(budget.num_rows)

    buffer = state.model_buffer
    if buffer is not None and config.policy.clear_each_iteration:
        buffer = model_buffer.cleared(buffer)
    buffer = refresh(context, num_rows, replay, state.actor_critic, buffer, key_first)
    starts = start_states(config, num_rows, replay, buffer)
    num_critic_updates = round(steps * config.policy.critic_only_share)
    actor_critic = state.actor_critic
    if config.critic.bounds == "endings":
        actor_critic = reach_ends(actor_critic, state.world.end_rewards)
    learner = (actor_critic, state.opt_states or fresh_opt_states(config, actor_critic))
    learner, _ = repeat(critic_only_update, num_critic_updates, context, starts, learner, key_critics)

    @jax.jit  # traced once, for the shapes and for the loop
    def one_round(i, learner, buffer):
        key_refresh, key_updates = jr.split(jr.fold_in(key_rounds, i))
        buffer = refresh(context, num_rows, replay, learner[0], buffer, key_refresh)
        starts = start_states(config, num_rows, replay, buffer)
        learner, metrics = repeat(joint_update, config.policy.refresh_every, context, starts, learner, key_updates)
        metrics = {name: jnp.mean(value) for name, value in metrics.items()}
        return learner, buffer, metrics | {"train/actor_gradient_norm": actor_gradient_norm(learner[1])}

    first = jnp.zeros((), jnp.int32)
    shapes = jax.eval_shape(one_round, first, learner, buffer)
    no_metrics = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes[-1])
    carry = (learner, buffer, no_metrics)
    carry = jax.lax.fori_loop(first, budget.num_rounds, lambda i, carry: one_round(i, *carry[:2]), carry)
    (actor_critic, opt_states), buffer, metrics = carry
    kept = opt_states if config.policy.keep_moments else None
    return AgentState(state.world, actor_critic, kept, buffer, key), metrics


def refresh(
    context: UpdateContext,
    num_rows: Int[Array, ""],
    replay: ReplayBuffer,
    actor_critic: ActorCritic,
    buffer: ModelBuffer | None,
    key: PRNGKeyArray,
) -> ModelBuffer | None:
    """A distribution rollout from states of the replay into the model buffer, if there is one."""
    if buffer is None:
        return None
    key_starts, key_noise = jr.split(key)
    config, task = context.config, context.task
    horizon, batch = config.horizons.distribution, config.distribution_rows
    starts = replay.rows.obs[jr.randint(key_starts, (horizon + 1, batch), 0, num_rows)]
    noise = draw_noise(task, horizon, batch, key_noise, context.rollout_noise)
    steps, last = distribution_rollout(task, context.world, actor_critic.actor, starts, noise)
    return model_buffer.push(buffer, kept_rows(config, steps, last))


def repeat(
    update: Callable[[UpdateContext, ActorCritic, OptStates, UpdateInputs], tuple[ActorCritic, OptStates, Metrics]],
    count: int,
    context: UpdateContext,
    starts: StartStates,
    learner: tuple[ActorCritic, OptStates],
    key: PRNGKeyArray,
) -> tuple[tuple[ActorCritic, OptStates], dict[str, Float[Array, " count"]]]:
    """`count` updates one after the other, each from a batch of its own of the start states."""

    def body(learner, inputs):
        actor_critic, opt_states, metrics = update(context, learner[0], learner[1], inputs)
        return (actor_critic, opt_states), metrics

    inputs = jax.vmap(lambda key: draw_inputs(context, starts, key))(jr.split(key, count))
    return jax.lax.scan(body, learner, inputs)


def _with_statistics(
    config: Config, world: WorldModel, replay: ReplayBuffer, num_rows: int | Int[Array, ""]
) -> WorldModel:
    """The model with statistics of the stored rows."""
    rows, used = replay.rows, jnp.arange(replay.rows.reward.shape[0]) < num_rows
    ended = used & (rows.terminated > 0)
    obs = fit_observations(rows.obs, used)
    change = fit_changes(rows.next_obs - rows.obs, used, obs)
    reward = fit_rewards(rows.reward, used, ended & world.learns_end_rewards(config))
    target = jax.tree.map(lambda *parts: jnp.concatenate(parts), reward, change)
    ends = None if world.end_rewards is None else fit_end_rewards(rows.reward, ended)
    return WorldModel(world.members, obs, target, world.termination_model, ends)


def _models_ends(config: Config, task: Task) -> bool:
    """Whether a termination model is needed: for the terminations, or where a rule is known for their rewards."""
    learns_rewards = task.can_end and config.terminator.rewards and task.reward is None
    return config.has_model and (task.learns_termination or learns_rewards)


def _counts_ends(config: Config) -> bool:
    """Whether it matters what rewards come with the ends of episodes."""
    return config.critic.bounds == "endings" or config.terminator.rewards


def _split(keys: Key[Array, " seed"], count: int = 2) -> list[Key[Array, " seed"]]:
    """Splits every seed's key."""
    return list(jnp.unstack(jax.vmap(lambda key: jr.split(key, count))(keys), axis=1))
