"""One update of critics, actor and temperature from one training rollout."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from doublehorizon import schedule
from doublehorizon.algorithm.actor_critic import ActorCritic, critic_values
from doublehorizon.algorithm.model_buffer import Rows
from doublehorizon.algorithm.networks import Actor, Critic, dropout_seeds
from doublehorizon.algorithm.rollouts import (
    RolloutNoise,
    draw_noise,
    no_perturbations,
    one_step_rollout,
    training_rollout,
)
from doublehorizon.algorithm.start_states import StartStates, as_transitions
from doublehorizon.algorithm.types import Rollout, Task
from doublehorizon.algorithm.values import expand_q, expand_value, update_bounds
from doublehorizon.algorithm.world_model import WorldModel
from doublehorizon.config import Config
from doublehorizon.schedule import Number

Metrics = dict[str, Float[Array, "*seed"]]
"""Figures by name, the same names every time."""


class UpdateContext(eqx.Module):
    """What stays as it is while a policy is improved."""

    config: Config = eqx.field(static=True)
    task: Task = eqx.field(static=True)
    world: WorldModel

    @property
    def discount(self) -> Number:
        """How much a reward one step later is worth."""
        return schedule.discount(self.config, self.task.episode_steps)

    @property
    def rollout_noise(self) -> Number:
        """Factor on the noise of imagined states."""
        return schedule.rollout_noise(self.config, self.task.can_end)

    @property
    def reward_unit(self) -> Float[Array, ""]:
        """In which temperature and losses are measured."""
        return self.world.reward_unit(self.config)


class UpdateInputs(eqx.Module):
    """All that is drawn for an update: start states and random numbers. Drawn beforehand, for many updates at once: on
    a GPU a small draw costs as much as a large one."""

    start: Rows
    noise: RolloutNoise
    next_act_noise: Float[Array, "batch act"]
    target_indices: Int[Array, " chosen"]
    dropout_seeds: UInt32[Array, "critic batch"]


def draw_inputs(context: UpdateContext, starts: StartStates, key: PRNGKeyArray) -> UpdateInputs:
    """For one update. The key is consumed."""
    config, task = context.config, context.task
    key_start, key_noise, key_critics, key_dropout, key_next_act = jr.split(key, 5)
    batch_size, critic = config.policy.batch_size, config.critic
    return UpdateInputs(
        start=starts.sample(config, key_start),
        noise=draw_noise(task, config.horizons.training, batch_size, key_noise, context.rollout_noise),
        next_act_noise=jr.normal(key_next_act, (batch_size, task.act_size)),
        target_indices=target_indices(context, key_critics),
        dropout_seeds=dropout_seeds(critic.members * batch_size, key_dropout).reshape(critic.members, batch_size),
    )


def target_indices(context: UpdateContext, key: PRNGKeyArray) -> Int[Array, " chosen"]:
    """The critics whose minimum is an update's target. The key is consumed."""
    members = context.config.critic.members
    return jnp.argsort(jr.bits(key, (members,)))[: schedule.target_members(context.config, context.task.can_end)]


class OptStates(eqx.Module):
    """Adam's states. They start afresh each iteration and then belong to no checkpoint, or last
    (`policy.keep_moments`)."""

    actor: optax.OptState
    critics: optax.OptState
    temperature: optax.OptState


def fresh_opt_states(config: Config, actor_critic: ActorCritic) -> OptStates:
    """Adam's states before the first update."""
    adam = optax.adam(config.policy.learning_rate)
    trained: Any = (actor_critic.actor, actor_critic.critics, actor_critic.log_temperature)
    return OptStates(*(adam.init(x) for x in trained))


def actor_gradient_norm(opt_states: OptStates) -> Float[Array, ""]:
    """Norm of the actor's gradient, averaged over the last updates as Adam does."""
    mean = optax.tree_utils.tree_get(opt_states.actor, "mu")
    return jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(mean)))


def joint_update(
    context: UpdateContext, actor_critic: ActorCritic, opt_states: OptStates, inputs: UpdateInputs
) -> tuple[ActorCritic, OptStates, Metrics]:
    """Critics first, then the actor against the updated critics, both from one training rollout."""
    config, task = context.config, context.task
    # one forward pass serves both; the actor's gradient is pulled back through it afterwards
    rollout, pull_back = jax.vjp(
        lambda perturbations: start_rollout(context, actor_critic, inputs, perturbations),
        no_perturbations(task, inputs.noise),
    )
    path = critic_rollout(context, actor_critic, inputs, rollout)
    actor_critic, opt_states, metrics = critic_update(context, actor_critic, opt_states, inputs, path)

    objective, gradient = jax.value_and_grad(lambda rollout: actor_objective(context, actor_critic, rollout))(rollout)
    # in units of the reward: Adam does not quite forget the scale of a gradient
    (descent,) = pull_back(jax.tree.map(lambda x: -x / context.reward_unit, gradient))
    gradient = actor_gradient(context, actor_critic.actor, rollout.obs, descent)
    temperature, entropy = actor_critic.temperature, -jnp.mean(rollout.log_prob[0])
    surplus = entropy - config.policy.target_entropy_per_action * task.act_size
    # temperature * surplus is also its own gradient in the log: entropy above its target lowers the temperature
    adam = optax.adam(config.policy.learning_rate)
    actor, actor_state = _step(adam, actor_critic.actor, gradient, opt_states.actor)
    log_temperature, temperature_state = _step(
        adam, actor_critic.log_temperature, temperature * surplus, opt_states.temperature
    )
    actor_critic = eqx.tree_at(lambda a: (a.actor, a.log_temperature), actor_critic, (actor, log_temperature))
    metrics = metrics | {
        "train/actor_loss": -objective,
        "train/ent_coef": temperature,
        "train/reward_unit": context.reward_unit,
        "train/entropy": entropy,
        "model/rollout_alive": jnp.mean(path.alive[-1]),
    }
    return actor_critic, OptStates(actor_state, opt_states.critics, temperature_state), metrics


def critic_only_update(
    context: UpdateContext, actor_critic: ActorCritic, opt_states: OptStates, inputs: UpdateInputs
) -> tuple[ActorCritic, OptStates, Metrics]:
    """The critics' half of a joint update."""
    rollout = start_rollout(context, actor_critic, inputs, no_perturbations(context.task, inputs.noise))
    path = critic_rollout(context, actor_critic, inputs, rollout)
    return critic_update(context, actor_critic, opt_states, inputs, path)


def start_rollout(
    context: UpdateContext,
    actor_critic: ActorCritic,
    inputs: UpdateInputs,
    perturbations: Float[Array, "states batch out"],
) -> Rollout:
    """The training rollout from the drawn states; a single state and action where its horizon is 0."""
    start = inputs.start.obs
    return training_rollout(context.task, context.world, actor_critic.actor, start, inputs.noise, perturbations)


def critic_rollout(
    context: UpdateContext, actor_critic: ActorCritic, inputs: UpdateInputs, rollout: Rollout
) -> Rollout:
    """What the critics learn from: the training rollout or, where its horizon is 0, the stored steps."""
    steps = as_transitions(inputs.start)
    if steps is None:
        return rollout
    log_prob = rollout.log_prob[0]
    return one_step_rollout(context.task, context.world, actor_critic.actor, steps, log_prob, inputs.next_act_noise)


def critic_update(
    context: UpdateContext, actor_critic: ActorCritic, opt_states: OptStates, inputs: UpdateInputs, rollout: Rollout
) -> tuple[ActorCritic, OptStates, Metrics]:
    """Eq. 13: a step of the critics towards their target for the first state and action; target critics follow."""
    config, world, unit = context.config, context.world, context.reward_unit
    rollout = jax.lax.stop_gradient(rollout)
    bounds = update_bounds(
        config.critic,
        context.discount,
        context.task.can_end,
        actor_critic.bounds,
        rollout,
        actor_critic.temperature * unit,
        world.end_rewards,
    )
    actor_critic = eqx.tree_at(lambda a: a.bounds, actor_critic, bounds)
    target = critic_target(context, actor_critic, rollout, inputs.target_indices)
    obs = world.obs_normalizer.normalize(rollout.obs[0])

    def loss(critics: Critic) -> Float[Array, ""]:
        q = bounds.scale(critic_values(critics, obs, rollout.act[0], inputs.dropout_seeds))
        return jnp.sum(jnp.mean(jnp.square((q - target[None]) / unit), axis=1))

    value, gradient = jax.value_and_grad(loss)(actor_critic.critics)
    adam = optax.adam(config.policy.learning_rate)
    critics, critic_state = _step(adam, actor_critic.critics, gradient, opt_states.critics)
    rate = config.critic.target_rate
    follow = lambda new, old: rate * new + (1.0 - rate) * old  # noqa: E731
    target_critics = jax.tree.map(follow, critics, actor_critic.target_critics)
    actor_critic = eqx.tree_at(lambda a: (a.critics, a.target_critics), actor_critic, (critics, target_critics))
    metrics = {
        "train/critic_loss": value * jnp.square(unit) / config.critic.members,
        "train/q_target": jnp.mean(target),
        "train/q_target_std": jnp.std(target),
        "train/q_low": bounds.low,
        "train/q_high": bounds.high,
    }
    return actor_critic, OptStates(opt_states.actor, critic_state, opt_states.temperature), metrics


def critic_target(
    context: UpdateContext, actor_critic: ActorCritic, rollout: Rollout, chosen: Int[Array, " chosen"]
) -> Float[Array, " batch"]:
    """What critics are trained towards: Eq. 9, with the minimum of the chosen target critics, bounded, after the last
    step."""
    obs = context.world.obs_normalizer.normalize(rollout.obs[-1])
    asked = jax.tree.map(lambda x: x[chosen], actor_critic.target_critics)  # the others need not be computed
    last_q = critic_values(asked, obs, rollout.act[-1])
    bounds = actor_critic.bounds
    least = bounds.clip(jnp.min(bounds.scale(last_q), axis=0))
    bonus_weight = actor_critic.temperature * context.reward_unit
    return expand_q(rollout, least, bonus_weight, context.discount)


def actor_objective(context: UpdateContext, actor_critic: ActorCritic, rollout: Rollout) -> Float[Array, ""]:
    """Eq. 14: the batch's mean expanded value (Eq. 7). After the last step stands the mean of all critics, neither
    clipped nor under dropout."""
    obs = context.world.obs_normalizer.normalize(rollout.obs[-1])
    raw = critic_values(actor_critic.critics, obs, rollout.act[-1])
    last_q = jnp.mean(actor_critic.bounds.scale(raw), axis=0)
    bonus_weight = actor_critic.temperature * context.reward_unit
    return jnp.mean(expand_value(rollout, last_q, bonus_weight, context.discount))


def actor_gradient(
    context: UpdateContext,
    actor: Actor,
    visited: Float[Array, "states batch obs"],
    cotangents: Float[Array, "states batch out"],
) -> Actor:
    """Gradient of the actor's weights, from the gradients (`cotangents`) of its outputs in all visited states.

    The weights act on a rollout through these outputs alone. So one backward pass over the states of all steps, side by
    side, replaces one per step whose results would be added up.
    """

    def rows(x: Float[Array, "states batch n"]) -> Float[Array, "rows n"]:
        return x.reshape(-1, x.shape[-1])

    obs = rows(context.world.obs_normalizer.normalize(visited))
    _, pull_back = jax.vjp(lambda actor: actor(obs), actor)
    (gradient,) = pull_back(rows(cotangents))
    return gradient


def _step(adam: optax.GradientTransformation, parameters: Any, gradient: Any, opt_state: optax.OptState) -> tuple:
    """Parameters and Adam's state after one step against the gradient."""
    updates, opt_state = adam.update(gradient, opt_state)
    return eqx.apply_updates(parameters, updates), opt_state
