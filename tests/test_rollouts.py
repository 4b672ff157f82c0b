import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from doublehorizon.algorithm.rollouts import (
    distribution_rollout,
    draw_noise,
    no_perturbations,
    training_rollout,
    visited,
)
from doublehorizon.algorithm.types import Task
from worlds import ConstantActor, line_world, no_noise

ENDLESS = Task(1, 1, None)
ENDS_PAST_TWO = Task(1, 1, lambda obs: obs[..., 0] > 2.0)


def roll(task, speed, start, noise):
    return training_rollout(task, line_world(), ConstantActor(speed), start, noise, no_perturbations(task, noise))


def states(task, speed, starts, noise):
    return visited(*distribution_rollout(task, line_world(), ConstantActor(speed), starts, noise))


def test_the_gradient_runs_through_every_step_of_the_training_rollout():
    # obs moves by the speed each step and the reward is the new position: 1 v, 2 v, 3 v
    def total(speed):
        return jnp.sum(roll(ENDLESS, speed, jnp.zeros((2, 1)), no_noise(3, 2)).reward[:, 0])

    value, slope = jax.value_and_grad(total)(jnp.array(0.25))
    assert float(value) == pytest.approx(6 * 0.25, rel=1e-4)
    assert float(slope) == pytest.approx(6.0, rel=1e-4)


def test_no_gradient_runs_through_the_distribution_rollout():
    def total(speed):
        starts = jnp.zeros((4, 2, 1))
        return jnp.sum(states(ENDLESS, speed, starts, no_noise(3, 2)))

    value, slope = jax.value_and_grad(total)(jnp.array(0.25))
    assert float(value) == pytest.approx(2 * 6 * 0.25, rel=1e-4)
    assert float(slope) == 0.0


def test_without_terminations_the_distribution_rollout_returns_every_state():
    starts = jnp.array([[[0.0], [5.0]], [[90.0], [90.0]], [[90.0], [90.0]]])
    found = states(ENDLESS, jnp.array(0.5), starts, no_noise(2, 2))
    np.testing.assert_allclose(found[..., 0], [[0.0, 5.0], [0.5, 5.5], [1.0, 6.0]], rtol=1e-4)


def test_a_row_that_ends_begins_anew_and_its_last_state_is_not_kept():
    # row 0 goes 1.8, (2.3 has ended) -> 0.1, 0.6; row 1 goes on
    starts = jnp.array([[[1.8], [0.0]], [[0.1], [9.0]], [[9.0], [9.0]]])
    steps, last = distribution_rollout(
        ENDS_PAST_TWO, line_world(), ConstantActor(jnp.array(0.5)), starts, no_noise(2, 2)
    )
    found = visited(steps, last)
    np.testing.assert_allclose(found[..., 0], [[1.8, 0.0], [0.1, 0.5], [0.6, 1.0]], rtol=1e-4)
    assert not np.any(np.asarray(found) > 2.0)
    # as steps, the one that ends is kept, with the state in which it does
    np.testing.assert_allclose(steps.next_obs[..., 0], [[2.3, 0.5], [0.6, 1.0]], rtol=1e-4)
    np.testing.assert_array_equal(steps.terminated, [[1, 0], [0, 0]])
    np.testing.assert_allclose(steps.act, 0.5, rtol=1e-4)
    np.testing.assert_allclose(steps.reward, steps.next_obs[..., 0], rtol=1e-4)


def test_alive_falls_to_zero_where_the_episode_ends_and_stays_there():
    back = Task(1, 1, lambda obs: (obs[..., 0] > 1.1) & (obs[..., 0] < 1.4))  # ended in one state only
    rollout = roll(back, jnp.array(0.25), jnp.full((2, 1), 0.5), no_noise(4, 2))
    np.testing.assert_allclose(rollout.obs[:, 0, 0], [0.5, 0.75, 1.0, 1.0, 1.0], rtol=1e-4)  # no further
    np.testing.assert_array_equal(rollout.alive[:, 0], [1, 1, 1, 0, 0])


def test_every_action_has_its_own_noise_and_perturbation():
    noise = no_noise(3, 2)
    drawn = jnp.array([[0.5, -1.0], [0.1, 0.2], [-0.3, 0.7], [1.5, -0.4]])
    noise = eqx.tree_at(lambda n: n.act, noise, drawn[..., None])
    shift = 0.1 * jnp.arange(8.0).reshape(4, 2)
    # the actor's second output is -20: 20 more makes the deviation softplus(0)
    perturbations = jnp.stack([shift, jnp.full((4, 2), 20.0)], axis=-1)
    actor, start = ConstantActor(jnp.array(0.25)), jnp.zeros((2, 1))
    rollout = training_rollout(ENDLESS, line_world(), actor, start, noise, perturbations)
    std = np.log(2.0) + 1e-5
    unsquashed = np.arctanh(0.25) + np.asarray(shift) + std * np.asarray(drawn)
    np.testing.assert_allclose(rollout.act[..., 0], np.tanh(unsquashed), rtol=1e-4)
    gaussian = -0.5 * np.square(drawn) - np.log(std) - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(rollout.log_prob, gaussian - np.log(1 - np.tanh(unsquashed) ** 2), rtol=1e-4)
    np.testing.assert_allclose(rollout.obs[1:, :, 0], np.cumsum(np.tanh(unsquashed)[:-1], axis=0), rtol=1e-4)


def test_the_random_numbers_of_a_rollout_are_independent():
    noise = draw_noise(Task(1, 1, None, learns_termination=True), 40, 50, jr.key(0))
    assert noise.ends is not None and float(noise.ends.min()) >= 0.0 and float(noise.ends.max()) < 1.0
    assert float(jnp.mean(noise.ends)) == pytest.approx(0.5, abs=0.03)
    parts = [noise.act[:-1, :, 0], noise.step.state[:, :, 0], noise.ends, noise.step.assignment.order.astype(float)]
    apart = np.corrcoef([np.asarray(x).ravel() for x in parts])
    assert np.abs(apart - np.eye(4)).max() < 0.08
    assert np.abs(np.corrcoef(np.asarray(noise.act[:, :, 0])) - np.eye(41)).max() < 0.6  # steps differ too
    for x in parts[:2]:
        assert (float(jnp.mean(x)), float(jnp.std(x))) == pytest.approx((0.0, 1.0), abs=0.08)
