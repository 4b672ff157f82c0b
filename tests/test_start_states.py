"""The model buffer, and where training starts."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from doublehorizon.algorithm import model_buffer
from doublehorizon.algorithm import replay_buffer as replays
from doublehorizon.algorithm.model_buffer import ModelBuffer, States
from doublehorizon.algorithm.start_states import as_transitions, empty_model_buffer, kept_rows, start_states
from doublehorizon.algorithm.types import Task, Transition
from doublehorizon.config_json import changed
from worlds import TINY

TASK = Task(1, 1, None)


def states(*values: float) -> States:
    return States(jnp.asarray(values, jnp.float32)[:, None])


def filled(capacity: int, *pushed: States) -> ModelBuffer:
    buffer = model_buffer.empty(States(jnp.zeros((capacity, 1))))
    for rows in pushed:
        buffer = model_buffer.push(buffer, rows)
    return buffer


def drawn(buffer: ModelBuffer, count: int = 300) -> set[float]:
    return set(np.asarray(model_buffer.sample(buffer, count, jr.key(0)).obs[:, 0]).tolist())


def test_the_model_buffer_keeps_the_most_recent_states():
    buffer = filled(5, states(0, 1, 2))
    assert int(buffer.size) == 3
    buffer = model_buffer.push(buffer, states(3, 4, 5, 6))
    assert int(buffer.size) == 5 and int(buffer.position) == 2
    assert np.asarray(buffer.rows.obs[:, 0]).tolist() == [5.0, 6.0, 2.0, 3.0, 4.0]


def test_a_cleared_buffer_starts_again():
    buffer = model_buffer.push(model_buffer.cleared(filled(5, states(1, 1, 1, 1))), states(7, 7))
    assert int(buffer.size) == 2 and int(buffer.position) == 2
    assert drawn(buffer) == {7.0}


def test_only_stored_states_are_drawn():
    assert drawn(filled(100, states(1, 2, 3))) == {1.0, 2.0, 3.0}


def real_rows() -> replays.ReplayBuffer:
    """Twenty rows: observations 100, 101, ..., of which ten count."""
    obs = 100.0 + jnp.arange(20.0)[:, None]
    rows = Transition(obs, 0 * obs, obs[:, 0], obs + 1, 0 * obs[:, 0])
    return replays.add(replays.empty(20, 1, 1, 2, 5), rows, jr.key(0))


@pytest.mark.parametrize(("share", "num_real"), [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_a_mixture_of_imagined_and_real_states_is_a_value(share, num_real):
    config = changed(TINY, {"policy.replay_start_share": share})  # a batch of 8
    starts = start_states(config, 10, real_rows(), filled(5, states(1, 2, 3)))
    obs = np.stack([np.asarray(starts.sample(config, jr.key(k)).obs[:, 0]) for k in range(200)])
    assert obs.shape == (200, 8)
    np.testing.assert_array_equal(np.sum(obs >= 100, axis=1), num_real)
    assert set(obs[obs < 100].tolist()) == ({1.0, 2.0, 3.0} if num_real < 8 else set())
    assert set(obs[obs >= 100].tolist()) == (set(100.0 + np.arange(10)) if num_real else set())


def test_without_distribution_rollouts_training_starts_in_the_replay():
    config = changed(TINY, {"horizons.distribution": 0})
    assert empty_model_buffer(config, TASK) is None
    obs = start_states(config, 10, real_rows(), None).sample(config, jr.key(0)).obs
    assert np.all((obs >= 100) & (obs < 110))


def test_what_a_distribution_rollout_leaves():
    obs, act, next_obs = (jnp.asarray(x, jnp.float32) for x in np.arange(18).reshape(3, 3, 2, 1))
    steps = Transition(obs, act, act[..., 0], next_obs, jnp.zeros((3, 2)))
    last = jnp.array([[-1.0], [-2.0]])
    with_rollouts = kept_rows(TINY, steps, last)
    assert isinstance(with_rollouts, States) and as_transitions(with_rollouts) is None
    np.testing.assert_array_equal(with_rollouts.obs[:, 0], [0, 1, 2, 3, 4, 5, -1, -2])
    config = changed(TINY, {"horizons.training": 0})
    single_steps = kept_rows(config, steps, last)
    assert isinstance(single_steps, Transition) and as_transitions(single_steps) is single_steps
    np.testing.assert_array_equal(single_steps.obs[:, 0], np.arange(6))
    np.testing.assert_array_equal(single_steps.next_obs[:, 0], 12 + np.arange(6))
    for one, rows in ((TINY, with_rollouts), (config, single_steps)):
        buffer = empty_model_buffer(one, TASK)
        assert buffer is not None and type(buffer.rows) is type(rows)
        assert buffer.rows.obs.shape == (TINY.policy.ring_capacity, 1)
