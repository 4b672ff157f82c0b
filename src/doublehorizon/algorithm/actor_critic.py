"""Actor, critics and what is known of Q; the values critics give, and the target they are trained towards."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from doublehorizon.algorithm.ensemble import ensemble
from doublehorizon.algorithm.networks import Actor, Critic
from doublehorizon.algorithm.normalizer import Normalizer
from doublehorizon.algorithm.types import Rollout, Task
from doublehorizon.algorithm.values import Bounds, expand_q, unknown_bounds
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
        """Weight of the entropy bonus."""
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


def critic_target(
    config: Config,
    actor_critic: ActorCritic,
    normalizer: Normalizer,
    rollout: Rollout,
    chosen: Int[Array, " chosen"],
) -> Float[Array, " batch"]:
    """What critics are trained towards: Eq. 9, with the minimum of the chosen target critics, bounded, after the last
    step."""
    obs = normalizer.normalize(rollout.obs[-1])
    last_q = critic_values(actor_critic.target_critics, obs, rollout.act[-1])[chosen]
    bounds = actor_critic.bounds
    least = bounds.clip(jnp.min(bounds.scale(last_q), axis=0))
    return expand_q(rollout, least, actor_critic.temperature, config.policy.discount)
