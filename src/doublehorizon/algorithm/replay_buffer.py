"""A ring of real transitions on the device.

Rows come in groups of `held_out_every`: one row of each group, drawn when the group is stored, is held out for
validation forever. So the numbers of training and validation rows follow from the number of rows alone, are the
same for every seed, and a random row of either kind is found by arithmetic instead of by sorting.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from doublehorizon.algorithm.types import Transition, blank_transitions


class ReplayBuffer(eqx.Module):
    """Stored transitions with what was drawn for them: bootstrap weights and the held-out row of each group."""

    rows: Transition
    weight: Float[Array, "rows member"]
    held_out: Int[Array, " group"]
    position: Int[Array, ""]


def empty(capacity: int, obs_size: int, act_size: int, num_members: int, group_size: int) -> ReplayBuffer:
    """Room for `capacity` rows, a multiple of `group_size`."""
    return ReplayBuffer(
        rows=blank_transitions(capacity, obs_size, act_size),
        weight=jnp.zeros((capacity, num_members)),
        held_out=jnp.zeros(capacity // group_size, jnp.int32),
        position=jnp.zeros((), jnp.int32),
    )


def add(replay: ReplayBuffer, rows: Transition, key: PRNGKeyArray) -> ReplayBuffer:
    """Stores rows (a multiple of the group size) after the last ones; the oldest are overwritten. The weights are
    Exp(1), one per member: each member sees its own bootstrap of the data. The key is consumed."""
    capacity, num_rows = replay.rows.reward.shape[0], rows.reward.shape[0]
    group_size = capacity // replay.held_out.shape[0]
    num_groups = num_rows // group_size
    key_weight, key_held_out = jr.split(key)
    weight = jr.exponential(key_weight, (num_rows, replay.weight.shape[1]))
    held_out = jr.randint(key_held_out, (num_groups,), 0, group_size)

    at = (replay.position + jnp.arange(num_rows)) % capacity
    at_group = (replay.position // group_size + jnp.arange(num_groups)) % replay.held_out.shape[0]
    return ReplayBuffer(
        rows=jax.tree.map(lambda old, new: old.at[at].set(new), replay.rows, rows),
        weight=replay.weight.at[at].set(weight),
        held_out=replay.held_out.at[at_group].set(held_out),
        position=(replay.position + num_rows) % capacity,
    )


def grow(replay: ReplayBuffer, capacity: int, num_rows: Int[Array, ""]) -> ReplayBuffer:
    """The same rows with room for more after them."""
    held = replay.rows.reward.shape[0]
    group_size = held // replay.held_out.shape[0]

    def longer(x: Shaped[Array, "rows ..."], by: int) -> Shaped[Array, "more ..."]:
        return jnp.pad(x, [(0, by)] + [(0, 0)] * (x.ndim - 1))

    return ReplayBuffer(
        rows=jax.tree.map(lambda x: longer(x, capacity - held), replay.rows),
        weight=longer(replay.weight, capacity - held),
        held_out=longer(replay.held_out, (capacity - held) // group_size),
        position=num_rows,
    )


def rewound(replay: ReplayBuffer, num_stored: int) -> ReplayBuffer:
    """The replay as if only `num_stored` rows had ever been stored: what comes next is written over the others."""
    position = jnp.full_like(replay.position, num_stored % replay.rows.reward.shape[-1])
    return eqx.tree_at(lambda r: r.position, replay, position)


def rows_at(replay: ReplayBuffer, places: list[tuple[int, int]]) -> list[Transition]:
    """Rows on the host, each by its seed's index and its position."""
    seeds, at = np.transpose(places)
    found = jax.device_get(jax.tree.map(lambda x: x[seeds, at], replay.rows))
    return [jax.tree.map(lambda x, i=i: x[i], found) for i in range(len(places))]


def with_rows(replay: ReplayBuffer, places: list[tuple[int, int]], rows: list[Transition]) -> ReplayBuffer:
    """The replay with other rows at these places; both have a leading seed axis."""
    seeds, at = np.transpose(places)
    new = jax.tree.map(lambda *x: np.stack(x), *rows)
    changed = jax.tree.map(lambda x, y: x.at[seeds, at].set(y), replay.rows, new)
    return eqx.tree_at(lambda r: r.rows, replay, changed)


def num_training(num_rows, group_size: int):
    """How many of `num_rows` rows (a number or a traced one) are not held out."""
    return num_rows // group_size * (group_size - 1)


def training_rows(replay: ReplayBuffer, which: Int[Array, " n"]) -> Int[Array, " n"]:
    """Positions of the training rows number `which`, counted without the held-out ones."""
    group_size = replay.rows.reward.shape[0] // replay.held_out.shape[0]
    group, rank = which // (group_size - 1), which % (group_size - 1)
    return group * group_size + rank + (rank >= replay.held_out[group])


def validation_rows(replay: ReplayBuffer, which: Int[Array, " n"]) -> Int[Array, " n"]:
    """Positions of the held-out rows number `which`."""
    group_size = replay.rows.reward.shape[0] // replay.held_out.shape[0]
    return which * group_size + replay.held_out[which]


def rows_of_age(
    replay: ReplayBuffer, age: Int[Array, "*shape"], num_rows: int | Int[Array, ""]
) -> Int[Array, "*shape"]:
    """Positions of rows by how many came after them, 0 for the newest, if `num_rows` are stored."""
    at = replay.position - 1 - age
    return jnp.where(at < 0, at + num_rows, at)  # `%` fails in a program over several devices


def take(replay: ReplayBuffer, at: Int[Array, " n"]) -> tuple[Transition, Float[Array, "n member"]]:
    """The rows at these positions, with their weights."""
    return jax.tree.map(lambda x: x[at], replay.rows), replay.weight[at]
