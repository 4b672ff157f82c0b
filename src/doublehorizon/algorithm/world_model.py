"""The learnt model: one imagined step from observation and action to next observation, reward and continuation."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from doublehorizon.algorithm.ensemble import RowAssignment
from doublehorizon.algorithm.networks import Dynamics
from doublehorizon.algorithm.normalizer import Normalizer
from doublehorizon.algorithm.termination_model import TerminationModel
from doublehorizon.algorithm.types import Task


class WorldModel(eqx.Module):
    """The ensemble (leading member axis), the statistics its inputs and outputs are normalised with, and the
    termination model where no rule is known."""

    members: Dynamics
    obs_normalizer: Normalizer
    target_normalizer: Normalizer
    termination_model: TerminationModel | None = None

    def in_storage_dtype(self) -> "WorldModel":
        """The same model, weights cast to the type in which they are multiplied: once instead of at every use."""
        members = self.members.in_storage_dtype()
        return WorldModel(members, self.obs_normalizer, self.target_normalizer, self.termination_model)


class StepNoise(eqx.Module):
    """The random numbers of one imagined step: state noise, and which member predicts which row."""

    state: Float[Array, "*lead batch obs"]
    assignment: RowAssignment


def imagine_step(
    task: Task, world: WorldModel, obs: Float[Array, "batch obs"], act: Float[Array, "batch act"], noise: StepNoise
) -> tuple[Float[Array, "batch obs"], Float[Array, " batch"]]:
    """Next observation (sampled) and reward (mean, or as the task knows it). A row's mean and noise come from the same
    member of the ensemble."""
    num_members = world.members.log_noise.shape[0]
    inputs = jnp.concatenate([world.obs_normalizer.normalize(obs), act], axis=-1)

    def predict(member, inputs, noise):
        return member(inputs).at[:, 1:].add(jnp.exp(member.log_noise[1:])[None] * noise)

    shares = noise.assignment.to_members(inputs, num_members)
    state_noise = noise.state.reshape(num_members, -1, noise.state.shape[-1])  # as random in any order of rows
    sampled = eqx.filter_vmap(predict)(world.members, shares, state_noise)
    target = world.target_normalizer.denormalize(noise.assignment.to_rows(sampled))
    next_obs = obs + target[:, 1:]
    return next_obs, target[:, 0] if task.reward is None else task.reward(obs, act, next_obs)


def continuation(
    task: Task,
    world: WorldModel,
    before: tuple[Float[Array, "batch obs"], Float[Array, "batch act"]],
    next_obs: Float[Array, "batch obs"],
    uniform: Float[Array, " batch"] | None,
) -> Float[Array, " batch"]:
    """1 where the episode goes on in `next_obs`, 0 where it has ended.

    By the task's rule, without gradient. Where termination is learnt: a sample decided by `uniform` numbers in
    [0, 1), without gradient; or, without those, the probability of going on, whose gradient leads the policy away from
    ends. `before` holds observation and action of the step.
    """
    if task.terminates is not None:
        return 1.0 - jax.lax.stop_gradient(task.terminates(next_obs)).astype(next_obs.dtype)
    if world.termination_model is None:
        return jnp.ones(next_obs.shape[0])
    end_probability = world.termination_model.probability(world.obs_normalizer, *before, next_obs)
    if uniform is not None:
        return jax.lax.stop_gradient(uniform >= end_probability).astype(next_obs.dtype)
    return 1.0 - end_probability


def normalized_target(
    normalizer: Normalizer,
    obs: Float[Array, "rows obs"],
    reward: Float[Array, " rows"],
    next_obs: Float[Array, "rows obs"],
) -> Float[Array, "rows target"]:
    """What the model should predict for real transitions."""
    return normalizer.normalize(raw_target(obs, reward, next_obs))


def raw_target(
    obs: Float[Array, "rows obs"], reward: Float[Array, " rows"], next_obs: Float[Array, "rows obs"]
) -> Float[Array, "rows target"]:
    """Reward and change of the observation, side by side, in the environment's units."""
    return jnp.concatenate([reward[:, None], next_obs - obs], axis=-1)
