"""The learnt world: one imagined step from observation and action to next observation, reward and life."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from doublehorizon.networks import Dynamics
from doublehorizon.normalizer import Normalizer
from doublehorizon.terminator import Terminator
from doublehorizon.types import Task


class World(eqx.Module):
    """The ensemble (leading member axis), the statistics its inputs and outputs are normalised with, and what says
    when an episode ends, if that is learnt."""

    members: Dynamics
    obs_normalizer: Normalizer
    target_normalizer: Normalizer
    terminator: Terminator | None = None

    def as_multiplied(self) -> "World":
        """The same, its weights in the type in which they are multiplied: cast once instead of at every use."""
        return World(self.members.as_multiplied(), self.obs_normalizer, self.target_normalizer, self.terminator)


class StepNoise(eqx.Module):
    """What chance decides in one imagined step: the state noise, and which member predicts which row."""

    state: Float[Array, "*lead batch obs"]
    order: Int[Array, "*lead batch"]
    places: Int[Array, "*lead batch"]
    """The inverse of `order`."""


def imagine_step(
    task: Task, world: World, obs: Float[Array, "batch obs"], act: Float[Array, "batch act"], noise: StepNoise
) -> tuple[Float[Array, "batch obs"], Float[Array, " batch"]]:
    """Next observation (sampled) and reward (mean, or as the task knows it), by trajectory sampling TS-1: every member
    predicts an equal, randomly drawn share of the rows, and a row's mean and noise come from the same member."""
    num_members = world.members.log_noise.shape[0]
    normalized = world.obs_normalizer.normalize(obs)
    inputs = jnp.concatenate([normalized, act], axis=-1)

    def predict_share(member, share, noise):
        mean = member(share)
        return mean.at[:, 1:].add(jnp.exp(member.log_noise[1:])[None] * noise)

    def shares(x: Float[Array, "batch n"]) -> Float[Array, "member share n"]:
        return x.reshape(num_members, -1, x.shape[-1])

    # the noise is as random in any order, so only the inputs are shuffled
    inputs = permuted(inputs, noise.order, noise.places)
    sampled = eqx.filter_vmap(predict_share)(world.members, shares(inputs), shares(noise.state))
    target = world.target_normalizer.denormalize(permuted(sampled.reshape(obs.shape[0], -1), noise.places, noise.order))
    next_obs = obs + target[:, 1:]
    return next_obs, target[:, 0] if task.reward is None else task.reward(obs, act, next_obs)


@jax.custom_vjp
def permuted(
    x: Float[Array, "batch n"], order: Int[Array, " batch"], inverse: Int[Array, " batch"]
) -> Float[Array, "batch n"]:
    """Rows in another order. Its slope is taken in the inverse order: left to itself JAX would scatter, which XLA
    cannot fuse with what comes before and after."""
    del inverse
    return x[order]


permuted.defvjp(
    lambda x, order, inverse: (x[order], (order, inverse)),
    lambda orders, slope: (permuted(slope, orders[1], orders[0]), None, None),
)


def survives(
    task: Task,
    world: World,
    before: tuple[Float[Array, "batch obs"], Float[Array, "batch act"]],
    next_obs: Float[Array, "batch obs"],
    chance: Float[Array, " batch"] | None,
) -> Float[Array, " batch"]:
    """1 where the episode goes on in `next_obs`, 0 where the task's rule says that it has ended; no gradient. Where the
    rule is learnt, it is decided by `chance`, uniform in [0, 1); without that, it is the probability, with a gradient
    that leads the policy away from ends."""
    if task.terminates is not None:
        return 1.0 - jax.lax.stop_gradient(task.terminates(next_obs)).astype(next_obs.dtype)
    if world.terminator is None:
        return jnp.ones(next_obs.shape[0])
    ends = world.terminator.probability(world.obs_normalizer, *before, next_obs)
    if chance is not None:
        return jax.lax.stop_gradient(chance >= ends).astype(next_obs.dtype)
    return 1.0 - ends


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
    """Reward and displacement, side by side."""
    return jnp.concatenate([reward[:, None], next_obs - obs], axis=-1)
