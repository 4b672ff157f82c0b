from dataclasses import replace

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from doublehorizon.algorithm.actor_critic import critic_values, reach_ends, untrained_actor_critic
from doublehorizon.algorithm.end_rewards import EndRewards
from doublehorizon.algorithm.normalizer import identity
from doublehorizon.algorithm.types import Rollout, Task
from doublehorizon.algorithm.updates import UpdateContext, critic_target
from doublehorizon.algorithm.values import Bounds, expand_q, expand_value, quantile, unknown_bounds, update_bounds
from doublehorizon.config import Config, CriticConfig
from doublehorizon.config_json import changed
from worlds import TINY, constant_critics, line_world


def rollout(reward, log_prob, alive, going_reward=None) -> Rollout:
    """A rollout of which only these fields matter; lists are over time, one batch row."""
    reward, log_prob, alive, going = (
        jnp.asarray(x, jnp.float32)[:, None] for x in (reward, log_prob, alive, going_reward or reward)
    )
    nothing = jnp.zeros((len(log_prob), 1, 1))
    return Rollout(nothing, nothing, log_prob, reward, going, alive)


def test_constant_reward_expands_to_the_geometric_sum():
    discount, steps, last = 0.9, 5, 7.0
    value = expand_value(
        rollout([1.0] * steps, [0.0] * (steps + 1), [1.0] * (steps + 1)), jnp.array([last]), jnp.array(0.3), discount
    )
    expected = (1 - discount**steps) / (1 - discount) + discount**steps * last
    np.testing.assert_allclose(value, [expected], rtol=1e-6)


def test_nothing_counts_behind_a_termination():
    # arrives in an ended state after the second step: rewards 0 and 1 count, the rest and the critic do not
    value = expand_value(
        rollout([1.0, 2.0, 100.0], [0.0] * 4, [1.0, 1.0, 0.0, 0.0]), jnp.array([1000.0]), jnp.array(0.0), 0.5
    )
    np.testing.assert_allclose(value, [1.0 + 0.5 * 2.0], rtol=1e-6)


@pytest.mark.parametrize("overflowed", [np.inf, np.nan])
def test_what_overflows_behind_a_termination_does_not_count(overflowed):
    path = rollout([1.0, 2.0, overflowed], [0.0] * 4, [1.0, 1.0, 0.0, 0.0])

    def value(reward, alive):
        moved = replace(path, reward=reward, alive=alive)
        return expand_value(moved, jnp.array([overflowed]), jnp.array(0.0), 0.5)[0]

    found, slopes = jax.value_and_grad(value, argnums=(0, 1))(path.reward, path.alive)
    np.testing.assert_allclose(found, 2.0, rtol=1e-6)
    np.testing.assert_allclose(slopes[0][:, 0], [1.0, 0.5, 0.0])
    np.testing.assert_allclose(slopes[1][:, 0], [1.0, 1.0, 0.0, 0.0])


def test_q_leaves_out_the_first_bonus_and_the_value_does_not():
    temperature, discount = jnp.array(0.5), 0.5
    path = rollout([1.0, 1.0], [-2.0, -4.0, -6.0], [1.0, 1.0, 1.0])
    value = expand_value(path, jnp.array([8.0]), temperature, discount)
    q = expand_q(path, jnp.array([8.0]), temperature, discount)
    # soft rewards 1 + 0.5 * (2, 4), then 8 + 0.5 * 6, discounted by 1, 1/2, 1/4
    np.testing.assert_allclose(value, [2.0 + 0.5 * 3.0 + 0.25 * 11.0], rtol=1e-6)
    np.testing.assert_allclose(q, [1.0 + 0.5 * 3.0 + 0.25 * 11.0], rtol=1e-6)


def test_the_target_takes_the_least_chosen_critic_and_bounds_it():
    context = UpdateContext(changed(Config(), {"policy.discount": 0.5}), Task(1, 1, None), line_world())
    path = rollout([0.0], [0.0, 0.0], [1.0, 1.0])

    def target(*chosen: int) -> float:
        judged = constant_critics((0.5, 0.0, -3.0, 9.0), bounds=(-10.0, 30.0), temperature=1.0)
        return float(critic_target(context, judged, path, jnp.array(chosen))[0])

    assert target(0, 1) == pytest.approx(5.0)  # raw 0.5 is 20 and raw 0 the centre, 10: the minimum, discounted
    assert target(0, 3) == pytest.approx(10.0)
    assert target(0, 2) == pytest.approx(-5.0)  # raw -3 is -50, clipped to -10
    assert target(3, 3) == pytest.approx(15.0)  # raw 9 is 190, clipped to 30


def test_scaling_maps_the_unit_interval_onto_the_bounds():
    bounds = Bounds(jnp.array(-100.0), jnp.array(300.0), jnp.array(True))
    np.testing.assert_allclose(bounds.scale(jnp.array([-1.0, 0.0, 1.0])), [-100.0, 100.0, 300.0])


def test_quantile_agrees_with_numpy_and_leaves_out_what_does_not_count():
    x = np.random.default_rng(0).normal(size=50).astype(np.float32)
    counted = np.arange(50) % 3 != 0
    for q in (0.01, 0.5, 0.99):
        np.testing.assert_allclose(
            quantile(jnp.asarray(x), jnp.asarray(counted), q), np.quantile(x[counted], q), rtol=1e-5
        )


def bounds_after(
    kind: str, alive, before: Bounds | None = None, can_end: bool = True, quantile_: float = 0.0
) -> Bounds:
    path = rollout([2.0, 3.0, -5.0], [0.0] * 4, alive)
    config = CriticConfig(bounds=kind, quantile=quantile_, bounds_rate=0.25)  # type: ignore[arg-type]
    return update_bounds(config, 0.9, can_end, before or unknown_bounds(), path, jnp.array(0.1))


def test_the_first_rollout_sets_the_bounds_and_later_ones_move_them():
    first = bounds_after("all", [1.0] * 4)
    assert (float(first.low), float(first.high)) == pytest.approx((-50.0, 30.0), rel=1e-5)
    moved = bounds_after("all", [1.0] * 4, Bounds(jnp.array(-10.0), jnp.array(10.0), jnp.array(True)))
    assert (float(moved.low), float(moved.high)) == pytest.approx((-20.0, 15.0), rel=1e-5)


def test_which_rewards_set_the_bounds():
    ended = [1.0, 1.0, 0.0, 0.0]  # the -5 lies behind the termination
    assert float(bounds_after("all", ended).low) == pytest.approx(-50.0, rel=1e-5)
    alive = bounds_after("alive", ended)
    assert (float(alive.low), float(alive.high)) == pytest.approx((20.0, 30.0), rel=1e-5)
    assert float(bounds_after("alive_and_zero", ended).low) == 0.0
    assert float(bounds_after("alive_and_zero", ended, can_end=False).low) == pytest.approx(20.0, rel=1e-5)


def endings(low: float, high: float, seen: bool = True) -> EndRewards:
    return EndRewards(jnp.array(low), jnp.array(high), identity(1), jnp.array(seen))


def range_after(reward, alive, ends: EndRewards | None = None, before: Bounds | None = None) -> tuple[float, float]:
    """Bounds after one rollout, by `endings`, with a discount of 0.9."""
    config = CriticConfig(bounds="endings", quantile=0.0, bounds_rate=0.25)
    path = rollout([999.0] * len(reward), [0.0] * len(alive), alive, going_reward=reward)
    after = update_bounds(config, 0.9, True, before or unknown_bounds(), path, jnp.array(0.1), ends)
    assert bool(after.known)
    return pytest.approx((float(after.low), float(after.high)), rel=1e-5)


def test_the_reward_of_an_ending_counts_once_and_that_of_other_steps_forever():
    # two steps that go on, one that ends the episode, one after the end
    reward, alive = [2.0, 3.0, -500.0, 77.0], [1.0, 1.0, 1.0, 0.0, 0.0]
    assert range_after(reward, alive) == (20.0, 30.0)  # no ending was ever really seen: none is counted
    assert range_after(reward, alive, endings(-500.0, -400.0, seen=False)) == (20.0, 30.0)
    assert range_after(reward, alive, endings(-500.0, -400.0)) == (-500.0, 30.0)
    assert range_after(reward, alive, endings(1.0, 100.0)) == (0.0, 100.0)  # after an end the value is 0
    assert range_after(reward, alive, endings(25.0, 26.0)) == (0.0, 30.0)
    assert range_after([-2.0, -3.0], [1.0, 1.0, 1.0], endings(-4.0, -1.0)) == (-30.0, 0.0)
    # an end that is more likely than not is one
    assert range_after([2.0, 3.0, 4.0], [1.0, 0.9, 0.6, 0.4]) == (20.0, 30.0)


def test_the_first_ending_moves_the_bounds_at_once_and_other_rewards_slowly():
    before = Bounds(jnp.array(-10.0), jnp.array(10.0), jnp.array(True))
    assert range_after([2.0, 3.0], [1.0] * 3, before=before) == (-2.5, 15.0)
    assert range_after([2.0, 3.0], [1.0] * 3, endings(-5000.0, -5000.0), before) == (-5000.0, 15.0)


def test_bounds_where_every_step_ends_or_no_reward_was_ever_seen():
    assert range_after([2.0, 3.0], [1.0, 0.0, 0.0], endings(2.0, 3.0)) == (0.0, 3.0)
    before = Bounds(jnp.array(-10.0), jnp.array(10.0), jnp.array(True))
    assert range_after([2.0, 3.0], [1.0, 0.0, 0.0], endings(2.0, 3.0), before) == (-10.0, 10.0)
    assert range_after([0.0, 0.0], [1.0] * 3) == (0.0, 0.0)
    nothing = Bounds(jnp.zeros(()), jnp.zeros(()), jnp.array(True))
    assert nothing.scale(jnp.array([5.0])).tolist() == [0.0]


def test_wider_bounds_leave_the_values_as_they_are():
    config, task = TINY, Task(3, 2, None)
    bounds = Bounds(jnp.array(-10.0), jnp.array(30.0), jnp.array(True))
    fresh = untrained_actor_critic(config, task, jr.key(0), jr.key(1))
    noisy = [jax.tree.map(lambda x, k=k: x + jr.normal(jr.key(k), x.shape), fresh.critics) for k in (4, 5)]
    before = replace(fresh, critics=noisy[0], target_critics=noisy[1], bounds=bounds)
    after = reach_ends(before, endings(-5000.0, 100.0))
    assert (float(after.bounds.low), float(after.bounds.high)) == (-5000.0, 100.0)
    obs, act = jr.normal(jr.key(2), (7, 3)), jr.normal(jr.key(3), (7, 2))
    for name in ("critics", "target_critics"):
        old, new = (a.bounds.scale(critic_values(getattr(a, name), obs, act)) for a in (before, after))
        np.testing.assert_allclose(old, new, rtol=1e-3, atol=1e-2)
        assert float(jnp.std(old)) > 0.1
    for same in (
        reach_ends(before, endings(-5.0, 3.0)),
        reach_ends(before, endings(-99.0, 0.0, seen=False)),
        reach_ends(before, None),
    ):
        assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (same, before)), strict=True))
    unknown = reach_ends(replace(before, bounds=unknown_bounds()), endings(-99.0, 0.0))  # the first update sets them
    assert not bool(unknown.bounds.known) and float(unknown.bounds.low) == 0.0


def test_the_bounds_count_the_entropy_bonus():
    path = rollout([1.0], [-3.0, 0.0], [1.0, 1.0])
    bounds = update_bounds(CriticConfig(quantile=0.0), 0.5, False, unknown_bounds(), path, jnp.array(2.0))
    assert float(bounds.high) == pytest.approx((1.0 + 2.0 * 3.0) / 0.5)


def test_no_gradient_runs_through_the_bounds():
    def high(temperature):
        path = rollout([1.0], [-3.0, 0.0], [1.0, 1.0])
        return update_bounds(CriticConfig(), 0.5, False, unknown_bounds(), path, temperature).high

    value, gradient = jax.value_and_grad(high)(jnp.array(2.0))
    assert float(value) == pytest.approx(14.0) and float(gradient) == 0.0
