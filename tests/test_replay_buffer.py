import jax.numpy as jnp
import jax.random as jr
import numpy as np

from doublehorizon.algorithm import replay_buffer as replays
from doublehorizon.algorithm.types import Transition


def rows(first: int, count: int) -> Transition:
    """Transitions that carry their number in every field, so that a misplaced one shows."""
    n = jnp.arange(first, first + count, dtype=jnp.float32)
    return Transition(n[:, None] * jnp.ones((1, 2)), -n[:, None], 10 * n, n[:, None] + 0.5 * jnp.ones((1, 2)), 0 * n)


def filled(count: int, capacity: int = 20) -> replays.ReplayBuffer:
    replay = replays.empty(capacity, 2, 1, num_members=3, group_size=5)
    for first in range(0, count, 10):
        replay = replays.add(replay, rows(first, 10), jr.key(first))
    return replay


def test_fields_stay_together_and_the_oldest_rows_are_overwritten():
    replay = filled(30)
    kept = replay.rows
    np.testing.assert_array_equal(np.sort(kept.reward), 10 * np.arange(10, 30))
    np.testing.assert_array_equal(kept.reward, 10 * kept.obs[:, 0])
    np.testing.assert_array_equal(kept.act[:, 0], -kept.obs[:, 1])
    np.testing.assert_array_equal(kept.next_obs, kept.obs + 0.5)
    assert int(replay.position) == 10


def test_one_row_in_five_is_held_out_and_the_others_are_training_rows():
    replay = filled(20)
    training = np.asarray(replays.training_rows(replay, jnp.arange(16)))
    held_out = np.asarray(replays.validation_rows(replay, jnp.arange(4)))
    np.testing.assert_array_equal(np.sort(np.concatenate([training, held_out])), np.arange(20))
    np.testing.assert_array_equal(held_out // 5, np.arange(4))
    assert int(replays.num_training(jnp.asarray(20), 5)) == 16


def test_a_row_keeps_its_weights_and_its_label_when_more_is_added():
    before, after = filled(10), filled(20)
    np.testing.assert_array_equal(before.weight[:10], after.weight[:10])
    np.testing.assert_array_equal(before.held_out[:2], after.held_out[:2])


def test_weights_are_exponential_and_differ_between_members():
    replay = replays.add(replays.empty(5000, 2, 1, 3, 5), rows(0, 5000), jr.key(0))
    weight = np.asarray(replay.weight)
    np.testing.assert_allclose(weight.mean(axis=0), 1.0, atol=0.06)
    np.testing.assert_allclose(weight.var(axis=0), 1.0, atol=0.15)
    assert abs(np.corrcoef(weight.T)[0, 1]) < 0.05
    counts = np.bincount(np.asarray(replay.held_out), minlength=5)
    assert np.all(np.abs(counts - 200) < 60)  # each place in a group is held out equally often


def test_taken_rows_come_with_their_weights():
    replay = filled(20)
    taken, weight = replays.take(replay, jnp.array([7, 3]))
    np.testing.assert_array_equal(taken.reward, [70.0, 30.0])
    np.testing.assert_array_equal(weight, replay.weight[jnp.array([7, 3])])


def test_a_grown_replay_keeps_its_rows_and_takes_more():
    replay = replays.grow(filled(20), 30, jnp.asarray(20, jnp.int32))
    np.testing.assert_array_equal(replay.weight[:20], filled(20).weight)
    replay = replays.add(replay, rows(20, 10), jr.key(20))
    np.testing.assert_array_equal(replay.rows.reward, 10 * np.arange(30))
    held_out = np.asarray(replays.validation_rows(replay, jnp.arange(6)))
    np.testing.assert_array_equal(held_out // 5, np.arange(6))


def test_a_rewound_replay_writes_over_what_came_later():
    replay = replays.rewound(filled(20), 25)  # the fifth row of its second round comes next
    assert int(replay.position) == 5
    np.testing.assert_array_equal(
        replays.add(replay, rows(100, 5), jr.key(1)).rows.reward[5:10], 10 * np.arange(100, 105)
    )
    assert int(replays.rewound(filled(20), 10).position) == 10
