"""The learnt model: one imagined step from observation and action to next observation, reward and continuation."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from doublehorizon.algorithm.end_rewards import EndRewards
from doublehorizon.algorithm.ensemble import RowAssignment
from doublehorizon.algorithm.networks import Dynamics
from doublehorizon.algorithm.normalizer import Normalizer
from doublehorizon.algorithm.termination_model import TerminationModel
from doublehorizon.algorithm.types import Task
from doublehorizon.config import Config


class WorldModel(eqx.Module):
    """The ensemble (leading member axis), the statistics its inputs and outputs are normalised with, the termination
    model where episodes can end, and statistics of the rewards of terminating steps."""

    members: Dynamics
    obs_normalizer: Normalizer
    target_normalizer: Normalizer
    termination_model: TerminationModel | None = None
    end_rewards: EndRewards | None = None

    def in_storage_dtype(self) -> "WorldModel":
        """The same model, weights cast to the type in which they are multiplied: once instead of at every use."""
        return eqx.tree_at(lambda w: w.members, self, self.members.in_storage_dtype())

    def learns_end_rewards(self, config: Config) -> bool:
        """Whether rewards of terminating steps are learnt apart from those of other steps, which the ensemble
        predicts."""
        return config.terminator.rewards and self.end_rewards is not None

    def reward_unit(self, config: Config) -> Float[Array, ""]:
        """In which temperature and losses are measured: how far rewards are from their mean or, by `size`, once an
        episode has ended, from 0, as what is at stake then is all that would have been earned."""
        spread = self.reward_spread(config)
        if config.policy.reward_unit != "size" or self.end_rewards is None:
            return spread
        return jnp.where(self.end_rewards.seen, jnp.hypot(self.target_normalizer.mean[0], spread), spread)

    def reward_spread(self, config: Config) -> Float[Array, ""]:
        """How far rewards are from their mean, where it is measured."""
        return jnp.ones(()) if config.policy.reward_unit == "one" else self.target_normalizer.std[0]


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
        mean, log_noise = member(inputs)
        return mean.at[:, 1:].add(jnp.exp(log_noise[:, 1:]) * noise)

    shares = noise.assignment.to_members(inputs, num_members)
    state_noise = noise.state.reshape(num_members, -1, noise.state.shape[-1])  # as random in any order of rows
    sampled = eqx.filter_vmap(predict)(world.members, shares, state_noise)
    target = world.target_normalizer.denormalize(noise.assignment.to_rows(sampled))
    next_obs = obs + target[:, 1:]
    return next_obs, target[:, 0] if task.reward is None else task.reward(obs, act, next_obs)


def imagine_end(
    task: Task,
    world: WorldModel,
    before: tuple[Float[Array, "batch obs"], Float[Array, "batch act"]],
    next_obs: Float[Array, "batch obs"],
    reward: Float[Array, " batch"],
    uniform: Float[Array, " batch"] | None,
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    """1 where the episode continues in `next_obs`, 0 where it has terminated; and the reward of the step, which is
    `reward` if it continues and otherwise, where rewards of terminating steps are learnt apart, theirs.

    Termination follows the task's rule, without gradient. Where it is learnt: a sample decided by `uniform` numbers in
    [0, 1), without gradient; or, without those, the probability of continuing, whose gradient leads the policy away
    from termination, and the expected reward. `before` holds observation and action of the step.
    """
    if world.termination_model is None and task.terminates is None:
        return jnp.ones(next_obs.shape[0]), reward
    probability, end_reward = jnp.zeros(next_obs.shape[0]), None
    if world.termination_model is not None:
        probability, end_reward = world.termination_model.predict(world.obs_normalizer, *before, next_obs)
    if task.terminates is not None:
        continues = 1.0 - jax.lax.stop_gradient(task.terminates(next_obs)).astype(next_obs.dtype)
    elif uniform is not None:
        continues = jax.lax.stop_gradient(uniform >= probability).astype(next_obs.dtype)
    else:
        continues = 1.0 - probability
    if end_reward is None or world.end_rewards is None or task.reward is not None:
        return continues, reward
    going = jnp.where(continues > 0.0, reward, 0.0)  # 0 times what overflowed is not a number
    return continues, continues * going + (1.0 - continues) * world.end_rewards.denormalize(end_reward)


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
