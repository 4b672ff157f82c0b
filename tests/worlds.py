"""Worlds that can be solved in one's head, as models, and the tiny config that tests share."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from doublehorizon.algorithm.actor_critic import ActorCritic
from doublehorizon.algorithm.ensemble import RowAssignment, ensemble
from doublehorizon.algorithm.kernels import MlpSpec
from doublehorizon.algorithm.networks import Actor, Critic, Dynamics, Mlp
from doublehorizon.algorithm.normalizer import identity
from doublehorizon.algorithm.rollouts import RolloutNoise
from doublehorizon.algorithm.types import Budget
from doublehorizon.algorithm.values import Bounds
from doublehorizon.algorithm.world_model import StepNoise, WorldModel
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

TINY = Config(
    horizons=Horizons(distribution=4, training=3),
    model=ModelConfig(members=2, width=16, rollout_noise=1.0),
    fit=FitConfig(batch_size=16, batches_per_step=0.5, batches_per_epoch=2, base_epochs=2.0, first_effort=2.0),
    critic=CriticConfig(members=3, target_members=2, width=16),
    policy=PolicyConfig(
        width=16,
        batch_size=8,
        discount=0.995,
        updates_per_step=1.0,
        refresh_every=4,
        ring_capacity=120,
        states_per_refresh=40,
    ),
    loop=LoopConfig(
        steps_per_iteration=20, seed_iterations=2, evaluate_every=2, evaluation_episodes=1, checkpoint_every=1
    ),
    terminator=TerminatorConfig(members=2, width=8, batch_size=16, batches=20),
)


class LineMlp(Mlp):
    """In place of a network: [position, action] to [new position, displacement], plus what is this member's own."""

    drift: jax.Array

    def __init__(self, drift):
        self.layers, self.spec, self.drift = (), MlpSpec((), "float32"), drift

    def __call__(self, x, seeds=None):
        position, act = x[:, 0], x[:, 1]
        return jnp.stack([position + act + self.drift, act + self.drift], axis=-1)


class LineMember(Dynamics):
    """A hand-made member: the observation moves by the action and the reward is the new position."""

    def __init__(self, log_noise, drift):
        self.mlp, self.log_noise = LineMlp(drift), log_noise

    def in_storage_dtype(self):
        return self


def line_world(num_members: int = 2, drift: tuple[float, ...] | None = None, log_noise: float = -100.0) -> WorldModel:
    """One-dimensional: next_obs = obs + act (+ drift), reward = next_obs."""
    drifts = jnp.zeros(num_members) if drift is None else jnp.asarray(drift)
    members = LineMember(jnp.full((num_members, 2), log_noise), drifts)
    return WorldModel(members, identity(1), identity(2))


class ConstantActor(Actor):
    """Acts the same everywhere; `speed` is what one differentiates by."""

    speed: jax.Array

    def __init__(self, speed):
        self.mlp, self.speed = LineMlp(speed), speed

    def __call__(self, obs):
        return jnp.concatenate(
            [jnp.arctanh(self.speed) + 0.0 * obs[:, :1], jnp.full((obs.shape[0], 1), -20.0)], axis=-1
        )


class ConstantCritic(Critic):
    """Says the same of every state and action; as an ensemble, each of its members its own."""

    value: jax.Array

    def __init__(self, value):
        self.mlp, self.value = LineMlp(value), value

    def __call__(self, inputs, seeds=None):
        return jnp.full(inputs.shape[0], self.value)


def constant_critics(
    raw: tuple[float, ...], bounds: tuple[float, float], temperature: float, actor: Actor | None = None
) -> ActorCritic:
    """An actor with target critics whose raw outputs are these; 0 and 1 are the middle and the end of the bounds."""
    critics = ConstantCritic(jnp.asarray(raw))
    known = Bounds(jnp.asarray(bounds[0]), jnp.asarray(bounds[1]), jnp.array(True))
    actor = ConstantActor(jnp.array(0.25)) if actor is None else actor
    return ActorCritic(actor, critics, critics, jnp.log(jnp.asarray(temperature)), known)


def no_noise(horizon: int, batch_size: int, obs_size: int = 1, act_size: int = 1) -> RolloutNoise:
    order = jnp.tile(jnp.arange(batch_size)[None], (horizon, 1))
    return RolloutNoise(
        act=jnp.zeros((horizon + 1, batch_size, act_size)),
        step=StepNoise(jnp.zeros((horizon, batch_size, obs_size)), RowAssignment(order, order)),
        ends=None,
    )


@eqx.filter_jit
def random_world(obs_size: int, act_size: int, num_members: int, seed: int = 0) -> WorldModel:
    members = ensemble(lambda k: Dynamics(TINY.model, obs_size, act_size, k), num_members, jr.key(seed))
    return WorldModel(members, identity(obs_size), identity(1 + obs_size))


@eqx.filter_jit
def random_actor(obs_size: int, act_size: int, seed: int = 0) -> Actor:
    return Actor(TINY.policy, obs_size, act_size, jr.key(seed))


def budget(
    num_rows: int, batches: int = 1, patience: int = 100, epochs: int = 1, rounds: int = 1, ends: int = 1
) -> Budget:
    """A small one, as a program takes it."""
    return Budget(num_rows, min(num_rows, 20), batches, patience, epochs, ends, rounds).traced()
