"""The errors of models that are known, one step and many steps ahead."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import doublehorizon as dh
from doublehorizon.algorithm import replay_buffer as replays
from doublehorizon.algorithm.agent import initial_state
from doublehorizon.algorithm.model_fit import as_one_gaussian
from doublehorizon.algorithm.types import Task, Transition
from doublehorizon.analysis import model_error
from doublehorizon.analysis.loaded_seed import LoadedSeed
from worlds import TINY, line_world


def line_rows(count: int, seed: int = 0) -> Transition:
    """A walk along the line world, in two episodes."""
    rng = np.random.default_rng(seed)
    act = rng.uniform(-0.5, 0.5, (count, 1)).astype(np.float32)
    obs, next_obs = np.zeros((count, 1), np.float32), np.zeros((count, 1), np.float32)
    for t in range(count):
        obs[t] = 5.0 if t in (0, count // 2) else next_obs[t - 1]
        next_obs[t] = obs[t] + act[t]
    return Transition(*(jnp.asarray(x) for x in (obs, act, next_obs[:, 0], next_obs, np.zeros(count, np.float32))))


def test_a_model_that_is_right_has_no_error_and_one_that_drifts_has_that_of_its_drift():
    rows = line_rows(50)
    right = model_error.accuracy(TINY, line_world(), rows)
    assert right.rows == 50 and right.total < 1e-5
    drifting = model_error.accuracy(TINY, line_world(drift=(0.3, 0.1)), rows)
    np.testing.assert_allclose(drifting.rmse, [0.2, 0.2], rtol=1e-4)  # the mean of both members
    scale = np.array([np.std(rows.next_obs), np.std(rows.act)])
    np.testing.assert_allclose(drifting.relative, 0.2 / scale, rtol=1e-3)
    # its members differ by 0.2, a deviation of 0.1 sqrt 2: 0.2 is within 1.96 of them, not within 0.67
    still = model_error.accuracy(TINY, line_world(), replace_rewards(rows, 1.0))
    assert still.relative[0] == 0.0 and still.rmse[0] > 0  # it never changes
    assert drifting.coverage == {0.5: 0.0, 0.8: 0.0, 0.95: 1.0}


def test_the_ensemble_is_the_same_gaussian_in_fits_and_analyses():
    mean, log_noise = jnp.array([[[1.0]], [[3.0]]]), jnp.log(jnp.array([[[0.5]], [[2.0]]]))
    middle, variance = as_one_gaussian(mean, log_noise)
    assert float(middle[0, 0]) == 2.0 and float(variance[0, 0]) == pytest.approx(0.5 * 2.0 + 2.0)  # geometric mean
    world = eqx.tree_at(lambda w: w.members.log_noise, line_world(), jnp.log(jnp.array([[0.5, 0.5], [2.0, 2.0]])))
    rows = replace_rewards(line_rows(50), 1e9)  # outside any interval but that of the change, which is right
    _, deviation = model_error._predict(world, rows)
    np.testing.assert_allclose(deviation, 1.0, rtol=1e-5)  # the members agree


def replace_rewards(rows: Transition, value: float) -> Transition:
    return eqx.tree_at(lambda r: r.reward, rows, jnp.full_like(rows.reward, value))


def line_subject(rows: Transition, drift) -> LoadedSeed:
    replay = eqx.tree_at(lambda r: r.rows, replays.empty(len(rows.reward), 1, 1, 2, 5), rows)
    state = eqx.tree_at(lambda s: s.world, initial_state(TINY, Task(1, 1, None), jnp.array(0)), line_world(drift=drift))
    return LoadedSeed(TINY, Task(1, 1, None), 0, len(rows.reward), state, replay, 1.0)


def test_open_loop_errors_add_up_along_real_trajectories():
    rows = line_rows(40)
    starts = model_error.trajectories(rows, 40, horizon=5, most=100, seed=0)
    assert len(starts) == 2 * (20 - 4) and 17 not in starts and 16 - 1 in starts  # none across the new episode
    found = model_error.open_loop(line_subject(rows, (0.1, 0.1)), starts, 5, 4, jr.key(0))
    np.testing.assert_allclose(found.error, 0.1 * np.arange(1, 6), rtol=1e-3)
    np.testing.assert_allclose(found.spread, 0.0, atol=1e-5)
    assert found.standing_still[0] == pytest.approx(np.sqrt(np.mean(np.square(rows.act[starts]))), rel=1e-4)
    with pytest.raises(dh.UserError, match="no stretch of 30 steps"):
        model_error.trajectories(rows, 40, horizon=30, most=100, seed=0)


def test_a_model_that_is_fitted_again_takes_the_newest_of_its_own_rows(monkeypatch):
    full, taken = line_subject(line_rows(65), None), []
    loaded = replace(full, num_rows=50, replay=replays.rewound(full.replay, 50))

    def fit(config, budget, replay, state):
        taken.append((int(budget.num_rows), jax.tree.map(lambda x: x[0], replay)))
        return state, {}

    monkeypatch.setattr(model_error.agent, "fit_model", fit)
    for asked in (20, 35):  # neither divides where the run stands
        model_error.refitted(loaded, asked)
        num_rows, replay = taken.pop()
        newest = replays.rows_of_age(replay, jnp.arange(5), num_rows)
        assert num_rows == asked and newest.tolist() == [asked - 1 - age for age in range(5)]
