"""One update of critics, actor and temperature from one training rollout."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from doublehorizon.config import Config
from doublehorizon.dynamics import World
from doublehorizon.networks import Actor, Critic
from doublehorizon.rollouts import training_rollout
from doublehorizon.types import Rollout, Task
from doublehorizon.values import Bounds, expand_q, expand_value, follow_bounds


class Policy(eqx.Module):
    """What policy optimisation changes. Critics have a leading ensemble axis."""

    actor: Actor
    critics: Critic
    target_critics: Critic
    log_temperature: Float[Array, ""]
    bounds: Bounds


class Moments(eqx.Module):
    """The optimisers' memory; it starts afresh each iteration and so belongs to no checkpoint."""

    actor: optax.OptState
    critics: optax.OptState
    temperature: optax.OptState


Metrics = dict[str, Float[Array, ""]]


def fresh_moments(config: Config, policy: Policy) -> Moments:
    init = optax.adam(config.policy.learning_rate).init
    return Moments(init(policy.actor), init(policy.critics), init(policy.log_temperature))


def joint_update(
    config: Config,
    task: Task,
    world: World,
    policy: Policy,
    moments: Moments,
    start: Float[Array, "batch obs"],
    key: PRNGKeyArray,
) -> tuple[Policy, Moments, Metrics]:
    """Critics first, then the actor against the updated critics, on one rollout: its forward pass is shared, and the
    actor's gradient is pulled back through it. The key is consumed."""
    key_rollout, key_critic = jr.split(key)
    rollout, pull_back = jax.vjp(
        lambda actor: training_rollout(task, config.horizons.training, world, actor, start, key_rollout),
        policy.actor,
    )
    policy, moments, metrics = critic_update(config, task, world, policy, moments, rollout, key_critic)

    temperature = jnp.exp(policy.log_temperature)
    objective, slope = jax.value_and_grad(
        lambda rollout: actor_objective(config, world, policy, rollout, temperature)
    )(rollout)
    (gradient,) = pull_back(jax.tree.map(jnp.negative, slope))
    entropy = -jnp.mean(rollout.log_prob[0])
    surplus = entropy - config.policy.target_entropy_per_action * task.act_size
    # d/d(log temperature) of temperature * surplus: entropy above its target lowers the temperature
    actor, actor_moments = _adam(config, policy.actor, gradient, moments.actor)
    log_temperature, temperature_moments = _adam(
        config, policy.log_temperature, temperature * surplus, moments.temperature
    )
    policy = Policy(actor, policy.critics, policy.target_critics, log_temperature, policy.bounds)
    metrics = metrics | {
        "train/actor_loss": -objective,
        "train/actor_gradient_norm": optax.global_norm(gradient),
        "train/ent_coef": temperature,
        "train/entropy": entropy,
        "model/rollout_alive": jnp.mean(rollout.alive[-1]),
    }
    return policy, Moments(actor_moments, moments.critics, temperature_moments), metrics


def critic_only_update(
    config: Config,
    task: Task,
    world: World,
    policy: Policy,
    moments: Moments,
    start: Float[Array, "batch obs"],
    key: PRNGKeyArray,
) -> tuple[Policy, Moments, Metrics]:
    """The critics' half of a joint update. The key is consumed."""
    key_rollout, key_critic = jr.split(key)
    rollout = training_rollout(task, config.horizons.training, world, policy.actor, start, key_rollout)
    return critic_update(config, task, world, policy, moments, rollout, key_critic)


def critic_update(
    config: Config,
    task: Task,
    world: World,
    policy: Policy,
    moments: Moments,
    rollout: Rollout,
    key: PRNGKeyArray,
) -> tuple[Policy, Moments, Metrics]:
    """Eq. 13: the critics move towards the expanded value of the first state and action, their targets follow."""
    key_pair, key_dropout = jr.split(key)
    rollout = jax.lax.stop_gradient(rollout)
    temperature = jnp.exp(policy.log_temperature)
    bounds = follow_bounds(
        config.critic, config.policy.discount, task.terminates is not None, policy.bounds, rollout, temperature
    )
    target = critic_target(
        config, world, policy.target_critics, bounds, rollout, temperature, key_pair
    )
    obs = world.obs_normalizer.normalize(rollout.obs[0])

    def loss(critics: Critic) -> Float[Array, ""]:
        q = bounds.scale(_values(critics, obs, rollout.act[0], key_dropout))
        return jnp.sum(jnp.mean(jnp.square(q - target[None]), axis=1))

    value, gradient = jax.value_and_grad(loss)(policy.critics)
    critics, critic_moments = _adam(config, policy.critics, gradient, moments.critics)
    target_critics = optax.incremental_update(critics, policy.target_critics, config.critic.target_rate)
    policy = Policy(policy.actor, critics, target_critics, policy.log_temperature, bounds)
    metrics = {
        "train/critic_loss": value / config.critic.members,
        "train/q_target": jnp.mean(target),
        "train/q_low": bounds.low,
        "train/q_high": bounds.high,
    }
    return policy, Moments(moments.actor, critic_moments, moments.temperature), metrics


def critic_target(
    config: Config,
    world: World,
    target_critics: Critic,
    bounds: Bounds,
    rollout: Rollout,
    temperature: Float[Array, ""],
    key: PRNGKeyArray,
) -> Float[Array, " batch"]:
    """Eq. 9 with the least of two random target critics, bounded, behind the last step. The key is consumed."""
    chosen = jr.permutation(key, config.critic.members)[: config.critic.target_members]
    some = jax.tree.map(lambda x: x[chosen], target_critics)
    obs = world.obs_normalizer.normalize(rollout.obs[-1])
    last_q = jnp.min(bounds.scale(_values(some, obs, rollout.act[-1])), axis=0)
    return expand_q(rollout, bounds.clip(last_q), temperature, config.policy.discount)


def actor_objective(
    config: Config, world: World, policy: Policy, rollout: Rollout, temperature: Float[Array, ""]
) -> Float[Array, ""]:
    """Eq. 14: the mean expanded value (Eq. 7), with the mean of all critics, neither clipped nor thinned by dropout,
    behind the last step."""
    obs = world.obs_normalizer.normalize(rollout.obs[-1])
    last_q = jnp.mean(policy.bounds.scale(_values(policy.critics, obs, rollout.act[-1])), axis=0)
    return jnp.mean(expand_value(rollout, last_q, temperature, config.policy.discount))


def _values(
    critics: Critic,
    obs: Float[Array, "batch obs"],
    act: Float[Array, "batch act"],
    key: PRNGKeyArray | None = None,
) -> Float[Array, "critic batch"]:
    """Every critic's raw output for every row; with a key, under dropout."""
    if key is None:
        return eqx.filter_vmap(lambda critic: jax.vmap(critic)(obs, act))(critics)
    num_critics, num_rows = critics.mlp.layers[0].bias.shape[0], obs.shape[0]
    keys = jr.split(key, (num_critics, num_rows))
    return eqx.filter_vmap(lambda critic, keys: jax.vmap(critic)(obs, act, keys))(critics, keys)


def _adam(config: Config, parameters, gradient, moments: optax.OptState):
    update, moments = optax.adam(config.policy.learning_rate).update(gradient, moments)
    return optax.apply_updates(parameters, update), moments
