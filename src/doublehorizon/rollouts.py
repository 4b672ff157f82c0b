"""The two horizons, side by side: a long rollout without gradient and a short one with it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from doublehorizon.dynamics import StepNoise, World, imagine_step, survives
from doublehorizon.kernels import on_gpu
from doublehorizon.networks import Actor, mean_and_std, sample_action
from doublehorizon.types import Rollout, Task, Transition


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
) -> tuple[Transition, Float[Array, "batch obs"]]:
    """DR: follows the policy through the model and returns its steps, `[horizon, batch]`, and the states in which it
    stops. A row begins in `starts[0]`; where its episode ends in step t it begins anew in `starts[t]`."""

    def step(obs, inputs):
        restart, act_noise, step_noise, chance = inputs
        act, _ = _choose(actor(world.obs_normalizer.normalize(obs)), act_noise)
        next_obs, reward = imagine_step(task, world, obs, act, step_noise)
        lives = survives(task, world, (obs, act), next_obs, chance)
        taken = Transition(obs, act, reward, next_obs, 1.0 - lives)
        return jnp.where(lives[:, None] > 0, next_obs, restart), taken

    last, steps = jax.lax.scan(step, starts[0], (starts[1:], noise.act[:-1], noise.step, noise.ends))
    return jax.lax.stop_gradient((steps, last))


def visited(steps: Transition, last: Float[Array, "batch obs"]) -> Float[Array, "states batch obs"]:
    """The states of a distribution rollout; in all of them an episode is running, and they are always as many."""
    return jnp.concatenate([steps.obs, last[None]])


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
        return (next_obs, alive * lives), (obs, act, log_prob, alive, reward)

    obs, alive, before = start, jnp.ones(start.shape[0]), None
    if nudges.shape[0] > 1:  # otherwise there is no step, and perhaps no model
        inputs = (nudges[:-1], noise.act[:-1], noise.step)
        # unrolled on a GPU, where a step is so short that the bookkeeping of a loop would show
        (obs, alive), before = jax.lax.scan(step, (obs, alive), inputs, unroll=on_gpu())
    act, log_prob = _choose(actor(world.obs_normalizer.normalize(obs)) + nudges[-1], noise.act[-1])
    last = [x[None] for x in (obs, act, log_prob, alive)]
    if before is None:
        states, acts, log_probs, lives = last
        return Rollout(states, acts, log_probs, jnp.zeros((0, start.shape[0])), lives)
    *parts, rewards = before
    states, acts, log_probs, lives = (jnp.concatenate(pair) for pair in zip(parts, last, strict=True))
    return Rollout(states, acts, log_probs, rewards, lives)


def no_nudges(task: Task, noise: RolloutNoise) -> Float[Array, "states batch out"]:
    return jnp.zeros((*noise.act.shape[:2], 2 * task.act_size))


def _choose(
    words: Float[Array, "batch out"], noise: Float[Array, "batch act"]
) -> tuple[Float[Array, "batch act"], Float[Array, " batch"]]:
    """The policy's actions, and their log-probabilities."""
    return sample_action(*mean_and_std(words), noise)


def taken_step(
    task: Task,
    world: World,
    actor: Actor,
    step: Transition,
    log_prob: Float[Array, " batch"],
    noise: Float[Array, "batch act"],
) -> Rollout:
    """A step of the past as a rollout of one step, behind which the policy acts as it does now. `log_prob` is that of
    what the policy would do now in the first state."""
    next_act, next_log_prob = _choose(actor(world.obs_normalizer.normalize(step.next_obs)), noise)
    reward = step.reward if task.reward is None else task.reward(step.obs, step.act, step.next_obs)
    alive = 1.0 - step.terminated
    return Rollout(
        obs=jnp.stack([step.obs, step.next_obs]),
        act=jnp.stack([step.act, next_act]),
        log_prob=jnp.stack([log_prob, next_log_prob]),
        reward=reward[None],
        alive=jnp.stack([jnp.ones_like(alive), alive]),
    )


class Ring(eqx.Module):
    """The most recent imagined states, or steps, in the environment's own units: statistics may change under them."""

    rows: Float[Array, "capacity obs"] | Transition
    position: Int[Array, ""]
    size: Int[Array, ""]


def empty_ring(rows: Float[Array, "capacity obs"] | Transition) -> Ring:
    """Room for as many rows as are given, which count for nothing."""
    zero = jnp.zeros((), jnp.int32)
    return Ring(rows, zero, zero)


def emptied(ring: Ring) -> Ring:
    """The ring as if nothing had been stored."""
    return Ring(ring.rows, jnp.zeros_like(ring.position), jnp.zeros_like(ring.size))


def push(ring: Ring, rows: Float[Array, "n obs"] | Transition) -> Ring:
    """Stores rows over the oldest ones."""
    (capacity, *_), (count, *_) = (jax.tree.leaves(x)[0].shape for x in (ring.rows, rows))
    at = (ring.position + jnp.arange(count)) % capacity
    return Ring(
        rows=jax.tree.map(lambda old, new: old.at[at].set(new), ring.rows, rows),
        position=(ring.position + count) % capacity,
        size=jnp.minimum(ring.size + count, capacity),
    )


def draw(ring: Ring, batch_size: int, key: PRNGKeyArray) -> Float[Array, "batch obs"] | Transition:
    """Rows drawn uniformly, with replacement."""
    at = jr.randint(key, (batch_size,), 0, ring.size)
    return jax.tree.map(lambda x: x[at], ring.rows)
