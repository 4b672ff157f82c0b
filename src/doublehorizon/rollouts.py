"""The two horizons, side by side: a long rollout without gradient and a short one with it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from doublehorizon.dynamics import StepNoise, World, imagine_step, survives
from doublehorizon.kernels import on_gpu
from doublehorizon.networks import Actor, mean_and_std, sample_action
from doublehorizon.types import Rollout, Task


class RolloutNoise(eqx.Module):
    """All that chance decides in a rollout, drawn beforehand: the rollout itself is plain arithmetic."""

    act: Float[Array, "choices batch act"]
    step: StepNoise
    ends: Float[Array, "steps batch"] | None
    """Uniform numbers that decide where episodes end, if that is learnt."""


def draw_noise(task: Task, horizon: int, batch_size: int, key: PRNGKeyArray) -> RolloutNoise:
    """For `horizon` steps and the action in the last state. The key is consumed."""
    key_act, key_state, key_order = jr.split(key, 3)
    key_ends = jr.fold_in(key, 3)  # as if split in four; in three, it leaves the others as they were
    # sorting random bits gives every step its own permutation of the rows
    order = jnp.argsort(jr.bits(key_order, (horizon, batch_size)), axis=-1)
    return RolloutNoise(
        act=jr.normal(key_act, (horizon + 1, batch_size, task.act_size)),
        step=StepNoise(
            state=jr.normal(key_state, (horizon, batch_size, task.obs_size)),
            order=order,
            places=jnp.argsort(order, axis=-1),
        ),
        ends=jr.uniform(key_ends, (horizon, batch_size)) if task.learns_termination else None,
    )


def distribution_rollout(
    task: Task,
    world: World,
    actor: Actor,
    starts: Float[Array, "states batch obs"],
    noise: RolloutNoise,
) -> Float[Array, "states batch obs"]:
    """DR: follows the policy through the model and returns states in which an episode is running, always the same
    number. A row begins in `starts[0]`; where its episode ends in step t it begins anew in `starts[t]`."""

    def step(obs, inputs):
        restart, act_noise, step_noise, chance = inputs
        act, _ = _choose(actor(world.obs_normalizer.normalize(obs)), act_noise)
        next_obs, _ = imagine_step(task, world, obs, act, step_noise)
        lives = survives(task, world, (obs, act), next_obs, chance)
        next_obs = jnp.where(lives[:, None] > 0, next_obs, restart)
        return next_obs, next_obs

    _, visited = jax.lax.scan(step, starts[0], (starts[1:], noise.act[:-1], noise.step, noise.ends))
    return jax.lax.stop_gradient(jnp.concatenate([starts[:1], visited]))


def training_rollout(
    task: Task,
    world: World,
    actor: Actor,
    start: Float[Array, "batch obs"],
    noise: RolloutNoise,
    nudges: Float[Array, "states batch out"],
) -> Rollout:
    """TR: the same, with gradients from rewards and last state to the actor's words in every step. `nudges`, zeros,
    are added to these: their slope is that of the words (see `updates.actor_gradient`). Rows that end are carried on
    with `alive` 0, or with the probability that they have not ended where that is learnt."""

    def step(carry, inputs):
        obs, alive = carry
        nudge, act_noise, step_noise = inputs
        act, log_prob = _choose(actor(world.obs_normalizer.normalize(obs)) + nudge, act_noise)
        next_obs, reward = imagine_step(task, world, obs, act, step_noise)
        lives = survives(task, world, (obs, act), next_obs, None)
        return (next_obs, alive * lives), (obs, act, log_prob, reward, alive)

    first = (start, jnp.ones(start.shape[0]))
    inputs = (nudges[:-1], noise.act[:-1], noise.step)
    # unrolled on a GPU, where a step is so short that the bookkeeping of a loop would show
    (obs, alive), before = jax.lax.scan(step, first, inputs, unroll=on_gpu())
    act, log_prob = _choose(actor(world.obs_normalizer.normalize(obs)) + nudges[-1], noise.act[-1])
    visited, acts, log_probs, rewards, lives = before

    def then(x: Float[Array, "horizon ..."], last: Float[Array, "..."]) -> Float[Array, "states ..."]:
        return jnp.concatenate([x, last[None]])

    return Rollout(then(visited, obs), then(acts, act), then(log_probs, log_prob), rewards, then(lives, alive))


def no_nudges(task: Task, noise: RolloutNoise) -> Float[Array, "states batch out"]:
    return jnp.zeros((*noise.act.shape[:2], 2 * task.act_size))


def _choose(
    words: Float[Array, "batch out"], noise: Float[Array, "batch act"]
) -> tuple[Float[Array, "batch act"], Float[Array, " batch"]]:
    """The policy's actions, and their log-probabilities."""
    return sample_action(*mean_and_std(words), noise)


class StateRing(eqx.Module):
    """The most recent imagined states, in the environment's own units: statistics may change under them."""

    obs: Float[Array, "capacity obs"]
    position: Int[Array, ""]
    size: Int[Array, ""]


def empty_ring(capacity: int, obs_size: int) -> StateRing:
    zero = jnp.zeros((), jnp.int32)
    return StateRing(jnp.zeros((capacity, obs_size)), zero, zero)


def emptied(ring: StateRing) -> StateRing:
    """The ring as if nothing had been stored."""
    return StateRing(ring.obs, jnp.zeros_like(ring.position), jnp.zeros_like(ring.size))


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
