import jax
import jax.numpy as jnp
import numpy as np
import pytest

from doublehorizon.algorithm.actor_critic import critic_target
from doublehorizon.algorithm.normalizer import identity
from doublehorizon.algorithm.types import Rollout
from doublehorizon.algorithm.values import Bounds, expand_q, expand_value, quantile, unknown_bounds, update_bounds
from doublehorizon.config import Config, CriticConfig
from doublehorizon.config_json import changed
from worlds import constant_critics


def rollout(reward, log_prob, alive) -> Rollout:
    """A rollout of which only these fields matter; lists are over time, one batch row."""
    column = lambda x: jnp.asarray(x, jnp.float32)[:, None]  # noqa: E731
    steps = len(log_prob)
    return Rollout(jnp.zeros((steps, 1, 1)), jnp.zeros((steps, 1, 1)), column(log_prob), column(reward), column(alive))


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


def test_q_leaves_out_the_first_bonus_and_the_value_does_not():
    temperature, discount = jnp.array(0.5), 0.5
    path = rollout([1.0, 1.0], [-2.0, -4.0, -6.0], [1.0, 1.0, 1.0])
    value = expand_value(path, jnp.array([8.0]), temperature, discount)
    q = expand_q(path, jnp.array([8.0]), temperature, discount)
    # soft rewards 1 + 0.5 * (2, 4), then 8 + 0.5 * 6, discounted by 1, 1/2, 1/4
    np.testing.assert_allclose(value, [2.0 + 0.5 * 3.0 + 0.25 * 11.0], rtol=1e-6)
    np.testing.assert_allclose(q, [1.0 + 0.5 * 3.0 + 0.25 * 11.0], rtol=1e-6)


def test_the_target_takes_the_least_chosen_critic_and_bounds_it():
    config = changed(Config(), {"policy.discount": 0.5})
    path = rollout([0.0], [0.0, 0.0], [1.0, 1.0])

    def target(*chosen: int) -> float:
        judged = constant_critics((0.5, 0.0, -3.0, 9.0), bounds=(-10.0, 30.0), temperature=1.0)
        return float(critic_target(config, judged, identity(1), path, jnp.array(chosen))[0])

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
