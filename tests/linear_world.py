"""Replays of a linear world, and untrained models of it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from doublehorizon.algorithm import replay_buffer as replays
from doublehorizon.algorithm.agent import _with_statistics
from doublehorizon.algorithm.ensemble import ensemble
from doublehorizon.algorithm.networks import Dynamics
from doublehorizon.algorithm.normalizer import identity
from doublehorizon.algorithm.types import Transition
from doublehorizon.algorithm.world_model import WorldModel
from worlds import TINY


@eqx.filter_jit
def problem(num_seeds: int, num_rows: int = 200):
    """Replays of a linear world, and untrained models with their statistics."""
    key_obs, key_act, key_store, key_model = jr.split(jr.key(0), 4)

    def one(seed):
        obs = jr.normal(jr.fold_in(key_obs, seed), (num_rows, 3))
        act = jr.uniform(jr.fold_in(key_act, seed), (num_rows, 2), minval=-1.0)
        next_obs = obs + 0.1 * jnp.concatenate([act, obs[:, :1]], axis=1)
        rows = Transition(obs, act, obs[:, 0] + act[:, 0], next_obs, jnp.zeros(num_rows))
        empty = replays.empty(num_rows, 3, 2, TINY.model.members, TINY.fit.held_out_every)
        replay = replays.add(empty, rows, jr.fold_in(key_store, seed))
        make = lambda k: Dynamics(TINY.model, 3, 2, k)  # noqa: E731
        members = ensemble(make, TINY.model.members, jr.fold_in(key_model, seed))
        untrained = WorldModel(members, identity(3), identity(4))
        return replay, _with_statistics(TINY, untrained, replay, jnp.asarray(num_rows))

    return jax.vmap(one)(jnp.arange(num_seeds))
