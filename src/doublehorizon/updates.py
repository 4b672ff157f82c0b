"""One update of critics, actor and temperature from one training rollout."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from doublehorizon.config import Config
from doublehorizon.dynamics import World
from doublehorizon.networks import Actor, Critic, dropout_seeds
from doublehorizon.optimizers import follow, start, step
from doublehorizon.rollouts import Ring, RolloutNoise, draw, draw_noise, no_nudges, taken_step, training_rollout
from doublehorizon.types import Rollout, Task, Transition
from doublehorizon.values import Bounds, expand_q, expand_value, follow_bounds


class Setting(eqx.Module):
    """What stays as it is while a policy is improved."""

    config: Config = eqx.field(static=True)
    task: Task = eqx.field(static=True)
    world: World


class Policy(eqx.Module):
    """What policy optimisation changes. Critics have a leading ensemble axis."""

    actor: Actor
    critics: Critic
    target_critics: Critic
    log_temperature: Float[Array, ""]
    bounds: Bounds


class Chance(eqx.Module):
    """All that chance decides in an update, drawn beforehand for many updates at once: on a GPU a small draw costs as
    much as a large one."""

    start: Float[Array, "batch obs"] | Transition
    """States, or steps of the past where there is no training rollout."""
    noise: RolloutNoise
    next_act: Float[Array, "batch act"]
    target_critics: Int[Array, " chosen"]
    dropout: UInt32[Array, "critic batch"]


def draw_chance(setting: Setting, ring: Ring, key: PRNGKeyArray) -> Chance:
    """For one update that starts in states, or from steps, of the ring. The key is consumed."""
    config, task = setting.config, setting.task
    key_start, key_noise, key_critics, key_dropout = jr.split(key, 4)
    batch_size, critic = config.policy.batch_size, config.critic
    return Chance(
        start=draw(ring, batch_size, key_start),
        noise=draw_noise(task, config.horizons.training, batch_size, key_noise),
        next_act=jr.normal(jr.fold_in(key, 4), (batch_size, task.act_size)),
        target_critics=jnp.argsort(jr.bits(key_critics, (critic.members,)))[: critic.target_members],
        dropout=dropout_seeds(critic.members * batch_size, key_dropout).reshape(critic.members, batch_size),
    )


class Moments(eqx.Module):
    """The optimisers' memory. It starts afresh each iteration and then belongs to no checkpoint, or lasts
    (`policy.keep_moments`)."""

    actor: optax.OptState
    critics: optax.OptState
    temperature: optax.OptState


Metrics = dict[str, Float[Array, "*seed"]]
"""Figures by name, the same names every time."""


def fresh_moments(config: Config, policy: Policy) -> Moments:
    adam = optax.adam(config.policy.learning_rate)
    return Moments(*(start(adam, x) for x in (policy.actor, policy.critics, policy.log_temperature)))


def gradient_norm(moments: Moments) -> Float[Array, ""]:
    """Of the actor's gradient, averaged over the last updates as Adam does."""
    mean = optax.tree_utils.tree_get(moments.actor, "mu")
    return jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(mean)))


def joint_update(setting: Setting, policy: Policy, moments: Moments, chance: Chance) -> tuple[Policy, Moments, Metrics]:
    """Critics first, then the actor against the updated critics, on one rollout: its forward pass is shared, and the
    actor's gradient is pulled back through it."""
    config, task = setting.config, setting.task
    rollout, pull_back = jax.vjp(
        lambda nudges: start_rollout(setting, policy, chance, nudges),
        no_nudges(task, chance.noise),
    )
    path = path_for_critics(setting, policy, chance, rollout)
    policy, moments, metrics = critic_update(setting, policy, moments, chance, path)

    temperature = jnp.exp(policy.log_temperature)
    objective, slope = jax.value_and_grad(lambda path: actor_objective(setting, policy, path, temperature))(rollout)
    gradient = actor_gradient(setting, policy.actor, rollout.obs, *pull_back(jax.tree.map(jnp.negative, slope)))
    entropy = -jnp.mean(rollout.log_prob[0])
    surplus = entropy - config.policy.target_entropy_per_action * task.act_size
    # temperature * surplus is also its own slope in the log: entropy above its target lowers the temperature
    adam = optax.adam(config.policy.learning_rate)
    actor, actor_moments = step(adam, policy.actor, gradient, moments.actor)
    log_temperature, temperature_moments = step(
        adam, policy.log_temperature, temperature * surplus, moments.temperature
    )
    policy = Policy(actor, policy.critics, policy.target_critics, log_temperature, policy.bounds)
    metrics = metrics | {
        "train/actor_loss": -objective,
        "train/ent_coef": temperature,
        "train/entropy": entropy,
        "model/rollout_alive": jnp.mean(path.alive[-1]),
    }
    return policy, Moments(actor_moments, moments.critics, temperature_moments), metrics


def critic_only_update(
    setting: Setting, policy: Policy, moments: Moments, chance: Chance
) -> tuple[Policy, Moments, Metrics]:
    """The critics' half of a joint update."""
    rollout = start_rollout(setting, policy, chance, no_nudges(setting.task, chance.noise))
    return critic_update(setting, policy, moments, chance, path_for_critics(setting, policy, chance, rollout))


def start_rollout(
    setting: Setting, policy: Policy, chance: Chance, nudges: Float[Array, "states batch out"]
) -> Rollout:
    """The training rollout, of no step at all where its horizon is 0."""
    start = chance.start.obs if isinstance(chance.start, Transition) else chance.start
    return training_rollout(setting.task, setting.world, policy.actor, start, chance.noise, nudges)


def path_for_critics(setting: Setting, policy: Policy, chance: Chance, rollout: Rollout) -> Rollout:
    """What the critics learn from: the training rollout or, without one, the steps of the past."""
    if not isinstance(chance.start, Transition):
        return rollout
    start, log_prob = chance.start, rollout.log_prob[0]
    return taken_step(setting.task, setting.world, policy.actor, start, log_prob, chance.next_act)


def critic_update(
    setting: Setting, policy: Policy, moments: Moments, chance: Chance, rollout: Rollout
) -> tuple[Policy, Moments, Metrics]:
    """Eq. 13: the critics move towards the expanded value of the first state and action, their targets follow."""
    config, task, world = setting.config, setting.task, setting.world
    rollout = jax.lax.stop_gradient(rollout)
    temperature = jnp.exp(policy.log_temperature)
    bounds = follow_bounds(
        config.critic,
        config.policy.discount,
        task.can_end,
        policy.bounds,
        rollout,
        temperature,
    )
    last_q = critic_values(policy.target_critics, world.obs_normalizer.normalize(rollout.obs[-1]), rollout.act[-1])
    target = critic_target(bounds, rollout, last_q[chance.target_critics], temperature, config.policy.discount)
    obs = world.obs_normalizer.normalize(rollout.obs[0])

    def loss(critics: Critic) -> Float[Array, ""]:
        q = bounds.scale(critic_values(critics, obs, rollout.act[0], chance.dropout))
        return jnp.sum(jnp.mean(jnp.square(q - target[None]), axis=1))

    value, gradient = jax.value_and_grad(loss)(policy.critics)
    adam = optax.adam(config.policy.learning_rate)
    critics, critic_moments = step(adam, policy.critics, gradient, moments.critics)
    target_critics = follow(critics, policy.target_critics, config.critic.target_rate)
    policy = Policy(policy.actor, critics, target_critics, policy.log_temperature, bounds)
    metrics = {
        "train/critic_loss": value / config.critic.members,
        "train/q_target": jnp.mean(target),
        "train/q_low": bounds.low,
        "train/q_high": bounds.high,
    }
    return policy, Moments(moments.actor, critic_moments, moments.temperature), metrics


def critic_target(
    bounds: Bounds,
    rollout: Rollout,
    last_q: Float[Array, "chosen batch"],
    temperature: Float[Array, ""],
    discount: float,
) -> Float[Array, " batch"]:
    """Eq. 9 with the least of the chosen target critics, bounded, behind the last step."""
    least = bounds.clip(jnp.min(bounds.scale(last_q), axis=0))
    return expand_q(rollout, least, temperature, discount)


def actor_objective(
    setting: Setting, policy: Policy, rollout: Rollout, temperature: Float[Array, ""]
) -> Float[Array, ""]:
    """Eq. 14: the mean expanded value (Eq. 7), with the mean of all critics, neither clipped nor thinned by dropout,
    behind the last step."""
    obs = setting.world.obs_normalizer.normalize(rollout.obs[-1])
    last_q = jnp.mean(policy.bounds.scale(critic_values(policy.critics, obs, rollout.act[-1])), axis=0)
    return jnp.mean(expand_value(rollout, last_q, temperature, setting.config.policy.discount))


def actor_gradient(
    setting: Setting, actor: Actor, visited: Float[Array, "states batch obs"], slopes: Float[Array, "states batch out"]
) -> Actor:
    """The slope of the actor's weights, given that of its words in every step. The weights act on a rollout through
    these words alone, so the states of all steps go through the actor side by side, once, instead of adding up the
    slopes of its weights step by step."""

    def rows(x: Float[Array, "states batch n"]) -> Float[Array, "rows n"]:
        return x.reshape(-1, x.shape[-1])

    obs = rows(setting.world.obs_normalizer.normalize(visited))
    _, pull_back = jax.vjp(lambda actor: actor(obs), actor)
    (gradient,) = pull_back(rows(slopes))
    return gradient


def critic_values(
    critics: Critic,
    obs: Float[Array, "batch obs"],
    act: Float[Array, "batch act"],
    dropout: UInt32[Array, "critic batch"] | None = None,
) -> Float[Array, "critic batch"]:
    """Every critic's raw output for every row; with seeds, under dropout."""
    inputs = jnp.concatenate([obs, act], axis=-1)
    if dropout is None:
        return eqx.filter_vmap(lambda critic: critic(inputs))(critics)
    return eqx.filter_vmap(lambda critic, seeds: critic(inputs, seeds))(critics, dropout)
