"""The two horizons, side by side: a long rollout without gradient and a short one with it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from doublehorizon.dynamics import World, draw_step_noise, imagine_step, survives
from doublehorizon.networks import Actor, sample_action
from doublehorizon.types import Rollout, Task


def distribution_rollout(
    task: Task,
    world: World,
    actor: Actor,
    starts: Float[Array, "horizon+1 batch obs"],
    key: PRNGKeyArray,
) -> Float[Array, "horizon+1 batch obs"]:
    """DR: follows the policy through the model and returns every state in which an episode is running. A row begins
    in `starts[0]`; where its episode ends in step t it begins anew in `starts[t]`, so that dead rows cost nothing
    and each call returns the same number of live states. The key is consumed."""
    horizon, batch_size = starts.shape[0] - 1, starts.shape[1]
    key_policy, key_model = jr.split(key)
    act_noise = jr.normal(key_policy, (horizon, batch_size, task.act_size))
    step_noise = draw_step_noise(horizon, batch_size, task.obs_size, key_model)

    def step(obs, inputs):
        restart, act_noise, step_noise = inputs
        normalized = world.obs_normalizer.normalize(obs)
        act, _ = jax.vmap(sample_action, in_axes=(None, 0, 0))(actor, normalized, act_noise)
        next_obs, _ = imagine_step(world, obs, act, step_noise)
        lives = survives(task.terminates, next_obs)
        next_obs = jnp.where(lives[:, None] > 0, next_obs, restart)
        return next_obs, next_obs

    _, visited = jax.lax.scan(step, starts[0], (starts[1:], act_noise, step_noise))
    return jax.lax.stop_gradient(jnp.concatenate([starts[:1], visited]))


def training_rollout(
    task: Task,
    horizon: int,
    world: World,
    actor: Actor,
    start: Float[Array, "batch obs"],
    key: PRNGKeyArray,
) -> Rollout:
    """TR: the same, with gradients from rewards and last state to the actor through every step. Rows that end are
    carried on with `alive` 0. The key is consumed."""
    batch_size = start.shape[0]
    key_policy, key_model = jr.split(key)
    act_noise = jr.normal(key_policy, (horizon + 1, batch_size, task.act_size))
    step_noise = draw_step_noise(horizon, batch_size, task.obs_size, key_model)

    def choose(obs, noise):
        normalized = world.obs_normalizer.normalize(obs)
        return jax.vmap(sample_action, in_axes=(None, 0, 0))(actor, normalized, noise)

    obs, alive = [start], [jnp.ones(batch_size)]
    act, log_prob, reward = [], [], []
    for t in range(horizon):  # unrolled: a loop of five small steps costs more to run than to compile
        chosen = choose(obs[t], act_noise[t])
        next_obs, gained = imagine_step(world, obs[t], chosen[0], jax.tree.map(lambda x, t=t: x[t], step_noise))
        act.append(chosen[0])
        log_prob.append(chosen[1])
        reward.append(gained)
        obs.append(next_obs)
        alive.append(alive[t] * survives(task.terminates, next_obs))
    last = choose(obs[-1], act_noise[-1])
    act.append(last[0])
    log_prob.append(last[1])
    return Rollout(*(jnp.stack(x) for x in (obs, act, log_prob, reward, alive)))


class StateRing(eqx.Module):
    """The most recent imagined states, in the environment's own units: statistics may change under them."""

    obs: Float[Array, "capacity obs"]
    position: Int[Array, ""]
    size: Int[Array, ""]


def empty_ring(capacity: int, obs_size: int) -> StateRing:
    zero = jnp.zeros((), jnp.int32)
    return StateRing(jnp.zeros((capacity, obs_size)), zero, zero)


def push(ring: StateRing, states: Float[Array, "n obs"]) -> StateRing:
    """Stores states over the oldest ones."""
    capacity = ring.obs.shape[0]
    at = (ring.position + jnp.arange(states.shape[0])) % capacity
    return StateRing(
        obs=ring.obs.at[at].set(states),
        position=(ring.position + states.shape[0]) % capacity,
        size=jnp.minimum(ring.size + states.shape[0], capacity),
    )


def draw(ring: StateRing, batch_size: int, key: PRNGKeyArray) -> Float[Array, "batch obs"]:
    """States drawn uniformly, with replacement."""
    return ring.obs[jr.randint(key, (batch_size,), 0, ring.size)]
