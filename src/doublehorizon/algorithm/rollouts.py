"""The two horizons, side by side: a long rollout without gradient and a short one with it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from doublehorizon.algorithm.ensemble import assign_rows
from doublehorizon.algorithm.kernels import on_gpu
from doublehorizon.algorithm.networks import Actor, mean_and_std, sample_action
from doublehorizon.algorithm.types import Rollout, Task, Transition
from doublehorizon.algorithm.world_model import StepNoise, WorldModel, imagine_end, imagine_step
from doublehorizon.schedule import Number


class RolloutNoise(eqx.Module):
    """All random numbers of a rollout, drawn beforehand: the rollout itself is plain arithmetic."""

    act: Float[Array, "states batch act"]
    step: StepNoise
    ends: Float[Array, "horizon batch"] | None
    """Uniform numbers that decide where episodes end, if that is learnt."""


def draw_noise(task: Task, horizon: int, batch_size: int, key: PRNGKeyArray, state_scale: Number = 1.0) -> RolloutNoise:
    """For `horizon` steps and the action in the last state. The noise of states is multiplied by `state_scale`. The key
    is consumed."""
    key_act, key_state, key_assignment, key_ends = jr.split(key, 4)
    return RolloutNoise(
        act=jr.normal(key_act, (horizon + 1, batch_size, task.act_size)),
        step=StepNoise(
            state=state_scale * jr.normal(key_state, (horizon, batch_size, task.obs_size)),
            assignment=assign_rows((horizon, batch_size), key_assignment),
        ),
        ends=jr.uniform(key_ends, (horizon, batch_size)) if task.learns_termination else None,
    )


def distribution_rollout(
    task: Task,
    world: WorldModel,
    actor: Actor,
    starts: Float[Array, "states batch obs"],
    noise: RolloutNoise,
) -> tuple[Transition, Float[Array, "batch obs"]]:
    """DR: follows the policy through the model, without gradient. Returns its steps, `[horizon, batch]`, and its last
    states. A row begins in `starts[0]`; where its episode ends in step t it begins anew in `starts[t]`."""

    def step(obs, inputs):
        restart, act_noise, step_noise, uniform = inputs
        act, _ = _act(actor(world.obs_normalizer.normalize(obs)), act_noise)
        next_obs, reward = imagine_step(task, world, obs, act, step_noise)
        goes_on, reward = imagine_end(task, world, (obs, act), next_obs, reward, uniform)
        taken = Transition(obs, act, reward, next_obs, 1.0 - goes_on)
        return jnp.where(goes_on[:, None] > 0, next_obs, restart), taken

    last, steps = jax.lax.scan(step, starts[0], (starts[1:], noise.act[:-1], noise.step, noise.ends))
    return jax.lax.stop_gradient((steps, last))


def visited(steps: Transition, last: Float[Array, "batch obs"]) -> Float[Array, "states batch obs"]:
    """The states of a distribution rollout: always as many, and in all of them an episode is running."""
    return jnp.concatenate([steps.obs, last[None]])


def training_rollout(
    task: Task,
    world: WorldModel,
    actor: Actor,
    start: Float[Array, "batch obs"],
    noise: RolloutNoise,
    perturbations: Float[Array, "states batch out"],
) -> Rollout:
    """TR: follows the policy through the model, differentiably.

    `perturbations` are zeros added to the actor's outputs in every state. The gradient with respect to them is that
    with respect to the outputs, from which `updates.actor_gradient` takes the gradient of the weights. A row that ends
    is carried on with `alive` 0, or with the probability that it has not ended where termination is learnt.
    """

    def step(carry, inputs):
        obs, alive = carry
        perturbation, act_noise, step_noise = inputs
        act, log_prob = _act(actor(world.obs_normalizer.normalize(obs)) + perturbation, act_noise)
        next_obs, going_reward = imagine_step(task, world, obs, act, step_noise)
        goes_on, reward = imagine_end(task, world, (obs, act), next_obs, going_reward, None)
        left = alive * goes_on
        next_obs = jnp.where(left[:, None] > 0.0, next_obs, obs)  # beyond an end nothing is imagined
        return (next_obs, left), (obs, act, log_prob, alive, reward, going_reward)

    obs, alive, before = start, jnp.ones(start.shape[0]), None
    if perturbations.shape[0] > 1:  # otherwise there is no step, and perhaps no model
        inputs = (perturbations[:-1], noise.act[:-1], noise.step)
        # unrolled on a GPU, where a step is so short that the bookkeeping of a loop would show
        (obs, alive), before = jax.lax.scan(step, (obs, alive), inputs, unroll=on_gpu())
    act, log_prob = _act(actor(world.obs_normalizer.normalize(obs)) + perturbations[-1], noise.act[-1])
    last = [x[None] for x in (obs, act, log_prob, alive)]
    if before is None:
        states, acts, log_probs, alives = last
        no_reward = jnp.zeros((0, start.shape[0]))
        return Rollout(states, acts, log_probs, no_reward, no_reward, alives)
    *parts, rewards, going_rewards = before
    states, acts, log_probs, alives = (jnp.concatenate(pair) for pair in zip(parts, last, strict=True))
    return Rollout(states, acts, log_probs, rewards, going_rewards, alives)


def no_perturbations(task: Task, noise: RolloutNoise) -> Float[Array, "states batch out"]:
    """Zeros in the shape of the actor's outputs along a rollout."""
    return jnp.zeros((*noise.act.shape[:2], 2 * task.act_size))


def one_step_rollout(
    task: Task,
    world: WorldModel,
    actor: Actor,
    step: Transition,
    log_prob: Float[Array, " batch"],
    noise: Float[Array, "batch act"],
) -> Rollout:
    """A stored transition as a rollout of one step; in its next state the current policy acts. `log_prob` is that of
    the current policy's action in the first state, whose entropy counts instead of the stored action's."""
    next_act, next_log_prob = _act(actor(world.obs_normalizer.normalize(step.next_obs)), noise)
    reward = step.reward if task.reward is None else task.reward(step.obs, step.act, step.next_obs)
    alive = 1.0 - step.terminated
    return Rollout(
        obs=jnp.stack([step.obs, step.next_obs]),
        act=jnp.stack([step.act, next_act]),
        log_prob=jnp.stack([log_prob, next_log_prob]),
        reward=reward[None],
        going_reward=reward[None],
        alive=jnp.stack([jnp.ones_like(alive), alive]),
    )


def _act(
    actor_out: Float[Array, "batch out"], noise: Float[Array, "batch act"]
) -> tuple[Float[Array, "batch act"], Float[Array, " batch"]]:
    """Sampled actions and their log-probabilities."""
    return sample_action(*mean_and_std(actor_out), noise)
