from dataclasses import replace

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from doublehorizon.algorithm.end_rewards import unknown_end_rewards
from doublehorizon.algorithm.ensemble import RowAssignment, even_shares
from doublehorizon.algorithm.normalizer import Normalizer, fit_changes, fit_observations, fit_rewards, identity
from doublehorizon.algorithm.rollouts import draw_noise
from doublehorizon.algorithm.types import Task
from doublehorizon.algorithm.world_model import (
    StepNoise,
    WorldModel,
    imagine_end,
    imagine_step,
    normalized_target,
)
from worlds import TINY, LineMember, line_world, random_world

ENDLESS = Task(1, 1, None)


def assigned(order) -> RowAssignment:
    return RowAssignment(order, jnp.argsort(order))


def test_every_row_is_predicted_by_one_member_and_every_member_gets_an_equal_share():
    # member m drifts by 10^m, so the displacement of a row names its member
    world = line_world(4, drift=(1.0, 10.0, 100.0, 1000.0))
    noise = jax.tree.map(lambda x: x[0], draw_noise(Task(1, 1, None), 1, 32, jr.key(0)).step)
    next_obs, reward = imagine_step(ENDLESS, world, jnp.zeros((32, 1)), jnp.zeros((32, 1)), noise)
    values, counts = np.unique(np.asarray(next_obs[:, 0]), return_counts=True)
    np.testing.assert_allclose(values, [1.0, 10.0, 100.0, 1000.0])
    np.testing.assert_array_equal(counts, [8, 8, 8, 8])
    np.testing.assert_allclose(reward, next_obs[:, 0])


def test_shares_are_drawn_anew_for_each_step_and_row():
    order = draw_noise(Task(1, 1, None), 200, 8, jr.key(1)).step.assignment.order
    np.testing.assert_array_equal(np.sort(order, axis=-1), np.tile(np.arange(8), (200, 1)))
    share = np.argsort(order, axis=-1) // 4  # which of two members has row i in each step
    assert np.all(np.abs(share.mean(axis=0) - 0.5) < 0.15)
    assert np.all(np.abs(np.corrcoef(share.T)[0, 1:]) < 0.4)


def test_mean_and_noise_of_a_row_come_from_the_same_member():
    # member 0 is silent and does not drift, member 1 drifts by 100 and has noise of scale 5
    members = LineMember(jnp.log(jnp.array([[1e-30, 1e-30], [1e-30, 5.0]])), jnp.array([0.0, 100.0]))
    world = WorldModel(members, identity(1), identity(2))
    order = jr.permutation(jr.key(2), 64)
    next_obs, _ = imagine_step(
        ENDLESS, world, jnp.zeros((64, 1)), jnp.zeros((64, 1)), StepNoise(jnp.ones((64, 1)), assigned(order))
    )
    assert sorted(set(np.asarray(next_obs[:, 0]).round(3).tolist())) == [0.0, 105.0]


def test_rows_keep_their_places_under_the_shuffle():
    world = line_world(2)
    obs, act = jnp.arange(8.0)[:, None], 0.1 * jnp.arange(8.0)[:, None]
    order = jr.permutation(jr.key(3), 8)
    next_obs, reward = imagine_step(ENDLESS, world, obs, act, StepNoise(jnp.zeros((8, 1)), assigned(order)))
    np.testing.assert_allclose(next_obs, obs + act, rtol=1e-6)
    np.testing.assert_allclose(reward, (obs + act)[:, 0], rtol=1e-6)


def test_a_step_denormalises_what_a_member_predicts():
    # normalised input (6 - 2) / 4 = 1; the member answers [1 + act, act] = [1.5, 0.5]
    world = WorldModel(
        line_world(1).members,
        Normalizer(jnp.array([2.0]), jnp.array([4.0])),
        Normalizer(jnp.array([10.0, 0.5]), jnp.array([3.0, 2.0])),
    )
    noise = StepNoise(jnp.zeros((1, 1)), assigned(jnp.zeros(1, jnp.int32)))
    next_obs, reward = imagine_step(ENDLESS, world, jnp.array([[6.0]]), jnp.array([[0.5]]), noise)
    assert float(next_obs[0, 0]) == pytest.approx(6.0 + 0.5 * 2.0 + 0.5)
    assert float(reward[0]) == pytest.approx(1.5 * 3.0 + 10.0)


def test_targets_are_reward_and_displacement_in_normal_units():
    normalizer = Normalizer(jnp.array([1.0, 2.0]), jnp.array([2.0, 4.0]))
    target = normalized_target(normalizer, jnp.array([[1.0]]), jnp.array([5.0]), jnp.array([[7.0]]))
    np.testing.assert_allclose(target, [[(5.0 - 1.0) / 2.0, (6.0 - 2.0) / 4.0]])


def test_statistics_cover_the_stored_rows_only_and_never_divide_by_zero():
    x = np.random.default_rng(0).normal(3.0, 2.0, (50, 3)).astype(np.float32)
    x[:, 1] *= 1e-7  # an observation in small units
    x[:, 2] = 1.7  # and one that never changes
    padded = np.concatenate([x, np.full((30, 3), 1e6, np.float32)])
    normalizer = fit_observations(jnp.asarray(padded), jnp.arange(80) < 50)
    np.testing.assert_allclose(normalizer.mean, x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(normalizer.std, [*x.std(0)[:2], 1.0], rtol=1e-5)
    np.testing.assert_allclose(normalizer.denormalize(normalizer.normalize(jnp.asarray(x))), x, rtol=1e-4)
    # changes of the same, half as large; the last one is predicted to within a millionth
    changes = fit_changes(jnp.asarray(0.5 * padded), jnp.arange(80) < 50, normalizer)
    np.testing.assert_allclose(changes.std, [*0.5 * x.std(0)[:2], 1e-6], rtol=1e-4)


def test_the_spread_of_rewards_is_theirs_on_any_scale():
    reward = np.random.default_rng(1).normal(3.0, 2.0, 60).astype(np.float32)
    ended = np.arange(60) % 7 == 0
    reward[ended] = -5000.0
    used = np.arange(60) < 50

    def found(scale: float, shift: float = 0.0) -> tuple[float, float]:
        rewards = fit_rewards(jnp.asarray(reward * scale + shift), jnp.asarray(used), jnp.asarray(ended))
        return float(rewards.mean[0]), float(rewards.std[0])

    going = reward[used & ~ended].astype(np.float64)
    assert found(1.0) == pytest.approx((going.mean(), going.std()), rel=1e-5)
    assert found(1e-6) == pytest.approx((1e-6 * going.mean(), 1e-6 * going.std()), rel=1e-4)
    assert found(1e6, 1e6)[1] == pytest.approx(1e6 * going.std(), rel=1e-4)
    # exactly so for a power of two
    assert found(1024.0) == tuple(1024.0 * x for x in found(1.0))


def test_rewards_that_are_all_the_same_have_a_spread_all_the_same():
    used, none = jnp.array([True] * 4), jnp.array([False] * 4)
    last = jnp.array([False] * 3 + [True])
    assert float(fit_rewards(jnp.zeros(4), used, none).std[0]) == 1.0
    assert float(fit_rewards(jnp.full(4, 1234.567), used, none).std[0]) == 1.0  # but for rounding
    prize = jnp.array([0.0, 0.0, 0.0, 100.0])  # only ends differ: their rewards count
    assert float(fit_rewards(prize, used, last).std[0]) == pytest.approx(np.std(prize))
    assert float(fit_rewards(prize, used, used).std[0]) == pytest.approx(np.std(prize))  # every step ends
    assert float(fit_rewards(prize, used, used).mean[0]) == 0.0


def test_a_task_without_a_rule_never_ends():
    world, before = line_world(), (jnp.zeros((2, 1)), jnp.zeros((2, 1)))
    reward = jnp.array([5.0, 6.0])
    goes_on, _ = imagine_end(ENDLESS, world, before, jnp.full((2, 1), jnp.nan), reward, None)
    assert goes_on.tolist() == [1.0, 1.0]
    past_two = Task(1, 1, lambda obs: obs[..., 0] > 2.0)
    goes_on, same = imagine_end(past_two, world, before, jnp.array([[1.0], [3.0]]), reward, None)
    assert goes_on.tolist() == [1.0, 0.0] and same.tolist() == [5.0, 6.0]


def test_the_ensemble_step_equals_members_called_by_hand():
    world = random_world(3, 2, TINY.model.members)
    obs, act = jr.normal(jr.key(0), (4, 3)), jr.normal(jr.key(1), (4, 2))
    order = jnp.array([2, 0, 3, 1])  # rows 2 and 0 go to member 0, rows 3 and 1 to member 1
    next_obs, reward = imagine_step(ENDLESS, world, obs, act, StepNoise(jnp.zeros((4, 3)), assigned(order)))
    for row, member in ((2, 0), (0, 0), (3, 1), (1, 1)):
        one = jax.tree.map(lambda x, m=member: x[m], world.members)
        mean, _ = one(jnp.concatenate([obs[row], act[row]])[None])
        out = mean[0]
        np.testing.assert_allclose(reward[row], out[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(next_obs[row], obs[row] + out[1:], rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_row_assignment_is_the_true_one():
    x, cotangent = jr.normal(jr.key(0), (2, 6, 3))
    assignment = assigned(jr.permutation(jr.key(1), 6))
    out, ours = jax.vjp(lambda x: assignment.to_members(x, 2), x)
    np.testing.assert_array_equal(out, x[assignment.order].reshape(2, 3, 3))
    _, derived = jax.vjp(lambda x: x[assignment.order], x)
    np.testing.assert_allclose(ours(cotangent.reshape(2, 3, 3))[0], derived(cotangent)[0])
    np.testing.assert_array_equal(assignment.to_rows(assignment.to_members(x, 2)), x)
    assert (even_shares(7, 4), even_shares(8, 4), even_shares(5, 0)) == (8, 8, 5)


def test_a_known_reward_takes_the_place_of_the_learnt_one():
    task = Task(1, 1, None, reward=lambda obs, act, next_obs: (100 * obs + 10 * act + next_obs)[..., 0])
    noise = StepNoise(jnp.zeros((2, 1)), assigned(jnp.arange(2)))
    obs, act = jnp.array([[1.0], [2.0]]), jnp.array([[0.5], [0.25]])
    _, reward = imagine_step(task, line_world(), obs, act, noise)
    np.testing.assert_allclose(reward, [100 + 5 + 1.5, 200 + 2.5 + 2.25], rtol=1e-5)


@pytest.mark.parametrize(
    ("unit", "ended", "expected"),
    [("spread", True, 4.0), ("size", True, 5.0), ("size", False, 4.0), ("size", None, 4.0), ("one", True, 1.0)],
)
def test_the_unit_of_rewards_by_hand(unit, ended, expected):
    """Rewards of -3 on average with a spread of 4 are 5 away from 0, which is what an ended episode earns. `ended`:
    whether one has; None where none can."""
    rewards = Normalizer(jnp.array([-3.0, 7.0]), jnp.array([4.0, 9.0]))
    ends = None if ended is None else replace(unknown_end_rewards(), seen=jnp.array(ended))
    world = WorldModel(line_world(2).members, identity(1), rewards, end_rewards=ends)
    assert float(world.reward_unit(TINY.with_(policy__reward_unit=unit))) == pytest.approx(expected)
