"""Worlds that can be solved in one's head, as models, and the tiny config that tests share."""

import jax
import jax.numpy as jnp
import jax.random as jr

from doublehorizon.config import (
    Config,
    CriticConfig,
    FitConfig,
    Horizons,
    LoopConfig,
    ModelConfig,
    PolicyConfig,
    TerminatorConfig,
)
from doublehorizon.dynamics import StepNoise, World
from doublehorizon.kernels import Plan
from doublehorizon.networks import Actor, Dynamics, Mlp, ensemble
from doublehorizon.normalizer import identity
from doublehorizon.rollouts import RolloutNoise

TINY = Config(
    horizons=Horizons(distribution=4, training=3),
    model=ModelConfig(members=2, width=16),
    fit=FitConfig(batch_size=16, batches_per_epoch=2, base_epochs=2.0, first_effort=2.0),
    critic=CriticConfig(members=3, width=16),
    policy=PolicyConfig(width=16, batch_size=8, refresh_every=4, ring_capacity=120, states_per_refresh=40),
    loop=LoopConfig(steps_per_iteration=20, seed_iterations=2, evaluate_every=2, evaluation_episodes=2),
    terminator=TerminatorConfig(members=2, width=8, batch_size=16, batches=20),
)


class LineMlp(Mlp):
    """In place of a network: [position, action] to [new position, displacement], plus what is this member's own."""

    drift: jax.Array

    def __init__(self, drift):
        self.layers, self.plan, self.drift = (), Plan((), "float32"), drift

    def __call__(self, x, seeds=None):
        position, act = x[:, 0], x[:, 1]
        return jnp.stack([position + act + self.drift, act + self.drift], axis=-1)


class LineMember(Dynamics):
    """A hand-made member: the observation moves by the action and the reward is the new position."""

    def __init__(self, log_noise, drift):
        self.mlp, self.log_noise = LineMlp(drift), log_noise

    def as_multiplied(self):
        return self


def line_world(num_members: int = 2, drift: tuple[float, ...] | None = None, log_noise: float = -100.0) -> World:
    """One-dimensional: next_obs = obs + act (+ drift), reward = next_obs."""
    drifts = jnp.zeros(num_members) if drift is None else jnp.asarray(drift)
    members = LineMember(jnp.full((num_members, 2), log_noise), drifts)
    return World(members, identity(1), identity(2))


class ConstantActor(Actor):
    """Acts the same everywhere; `speed` is what one differentiates by."""

    speed: jax.Array

    def __init__(self, speed):
        self.mlp, self.speed = LineMlp(speed), speed

    def __call__(self, obs):
        return jnp.concatenate(
            [jnp.arctanh(self.speed) + 0.0 * obs[:, :1], jnp.full((obs.shape[0], 1), -20.0)], axis=-1
        )


def no_noise(horizon: int, batch_size: int, obs_size: int = 1, act_size: int = 1) -> RolloutNoise:
    order = jnp.tile(jnp.arange(batch_size)[None], (horizon, 1))
    return RolloutNoise(
        act=jnp.zeros((horizon + 1, batch_size, act_size)),
        step=StepNoise(jnp.zeros((horizon, batch_size, obs_size)), order, order),
        ends=None,
    )


def random_world(obs_size: int, act_size: int, num_members: int, seed: int = 0) -> World:
    members = ensemble(lambda k: Dynamics(TINY.model, obs_size, act_size, k), num_members, jr.key(seed))
    return World(members, identity(obs_size), identity(1 + obs_size))


def random_actor(obs_size: int, act_size: int, seed: int = 0) -> Actor:
    return Actor(TINY.policy, obs_size, act_size, jr.key(seed))
