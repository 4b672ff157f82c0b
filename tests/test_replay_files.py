"""The replay's pieces on the disk."""

import jax
import numpy as np
import pytest

from doublehorizon.algorithm.replay_buffer import add, empty
from doublehorizon.algorithm.types import Transition
from doublehorizon.run import replay_files
from doublehorizon.run.progress import Archived


def filled(num_rows: int, capacity: int):
    """Two seeds' replays after so many rows, ten at a time; row number i has the reward i."""
    replay = jax.vmap(lambda _: empty(capacity, 2, 1, 3, 5))(np.arange(2))
    for begin in range(0, num_rows, 10):
        number = np.arange(begin, begin + 10, dtype=np.float32)
        rows = Transition(
            obs=jax.numpy.tile(number[:, None], (1, 2)),
            act=jax.numpy.asarray(number[:, None]),
            reward=jax.numpy.asarray(number),
            next_obs=jax.numpy.tile(number[:, None], (1, 2)),
            terminated=jax.numpy.zeros(10),
        )
        keys = jax.random.split(jax.random.key(begin), 2)
        replay = jax.vmap(lambda r, k, rows=rows: add(r, rows, k))(replay, keys)
    return replay


@pytest.mark.parametrize("steps", [[10, 20, 30], [30], [20, 60, 70], [40, 90]])
def test_rows_come_back_where_they_stood_even_behind_the_end_of_the_ring(tmp_path, steps):
    from doublehorizon.run.checkpoint_reader import _replay

    archived, capacity = Archived(), 40
    for stored in steps:
        rows = replay_files.new_rows(filled(stored, capacity), archived, stored, 10)
        archived = replay_files.append(tmp_path, rows, archived, stored)
    assert archived.rows == steps[-1]
    expected = filled(steps[-1], capacity)
    found = _replay(
        jax.eval_shape(lambda: expected), replay_files.read(tmp_path, archived, min(steps[-1], capacity)), steps[-1]
    )
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(a, b)


def test_pieces_that_are_too_old_go(tmp_path):
    archived = Archived()
    for stored in range(10, 101, 10):
        archived = replay_files.append(
            tmp_path, replay_files.new_rows(filled(stored, 40), archived, stored, 10), archived, stored
        )
    replay_files.forget(tmp_path, 100 - 40)
    assert len(list(tmp_path.iterdir())) == 4
    assert replay_files.read(tmp_path, archived, 40)["reward"][0].tolist() == list(range(60, 100))
    with pytest.raises(replay_files.DamageError, match="cannot be read"):
        replay_files.read(tmp_path, archived, 50)
