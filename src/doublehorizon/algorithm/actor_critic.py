"""Actor, critics, what is known of Q, and the values that critics give."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from doublehorizon.algorithm.end_rewards import EndRewards
from doublehorizon.algorithm.ensemble import ensemble
from doublehorizon.algorithm.networks import Actor, Critic
from doublehorizon.algorithm.types import Task
from doublehorizon.algorithm.values import Bounds, unknown_bounds
from doublehorizon.config import Config


class ActorCritic(eqx.Module):
    """What policy optimisation changes. Critics have a leading ensemble axis."""

    actor: Actor
    critics: Critic
    target_critics: Critic
    log_temperature: Float[Array, ""]
    bounds: Bounds

    @property
    def temperature(self) -> Float[Array, ""]:
        """Weight of the entropy bonus, in units of the reward (see `WorldModel.reward_unit`)."""
        return jnp.exp(self.log_temperature)


def untrained_actor_critic(
    config: Config, task: Task, key_actor: PRNGKeyArray, key_critic: PRNGKeyArray
) -> ActorCritic:
    """Fresh networks. The keys are consumed."""
    critics = untrained_critics(config, task, key_critic)
    return ActorCritic(
        actor=Actor(config.policy, task.obs_size, task.act_size, key_actor),
        critics=critics,
        target_critics=jax.tree.map(jnp.copy, critics),
        log_temperature=jnp.asarray(math.log(config.policy.initial_temperature), jnp.float32),
        bounds=unknown_bounds(),
    )


def untrained_critics(config: Config, task: Task, key: PRNGKeyArray) -> Critic:
    """A fresh ensemble. The key is consumed."""
    make = lambda k: Critic(config.critic, task.obs_size, task.act_size, k)  # noqa: E731
    return ensemble(make, config.critic.members, key)


def reach_ends(actor_critic: ActorCritic, end_rewards: EndRewards | None) -> ActorCritic:
    """Bounds at once as wide as endings ask for. The critics' last layers change such that no value does (PopArt)."""
    old = actor_critic.bounds
    new = old.reaching(end_rewards)
    width = jnp.maximum(new.high - new.low, jnp.finfo(jnp.float32).tiny)
    factor = jnp.where(old.known, (old.high - old.low) / width, 1.0)
    shift = jnp.where(old.known, (old.high + old.low - new.high - new.low) / width, 0.0)

    def unchanged(critics: Critic) -> Critic:
        last = critics.mlp.layers[-1]
        moved = (factor * last.weight, factor * last.bias + shift)
        return eqx.tree_at(lambda c: (c.mlp.layers[-1].weight, c.mlp.layers[-1].bias), critics, moved)

    new = Bounds(jnp.where(old.known, new.low, old.low), jnp.where(old.known, new.high, old.high), old.known)
    critics = (unchanged(actor_critic.critics), unchanged(actor_critic.target_critics))
    return eqx.tree_at(lambda a: (a.critics, a.target_critics, a.bounds), actor_critic, (*critics, new))


def critic_values(
    critics: Critic,
    obs: Float[Array, "batch obs"],
    act: Float[Array, "batch act"],
    dropout: UInt32[Array, "critic batch"] | None = None,
) -> Float[Array, "critic batch"]:
    """Every critic's raw output for normalised observations and actions; under dropout with its seeds."""
    inputs = jnp.concatenate([obs, act], axis=-1)
    if dropout is None:
        return eqx.filter_vmap(lambda critic: critic(inputs))(critics)
    return eqx.filter_vmap(lambda critic, seeds: critic(inputs, seeds))(critics, dropout)
