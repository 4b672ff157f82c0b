import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy import stats

from doublehorizon.algorithm.ensemble import ensemble
from doublehorizon.algorithm.networks import Critic, Dynamics, mean_and_std, orthogonal, sample_action
from worlds import TINY, random_actor


def test_log_probability_agrees_with_the_change_of_variables():
    noise = jnp.array([[0.7, -1.1]])
    mean, std = mean_and_std(random_actor(3, 2)(jnp.array([[0.3, -1.0, 2.0]])))
    act, log_prob = sample_action(mean, std, noise)
    # by a second method: density of the Gaussian at arctanh(act), times |d arctanh / d act|
    before = np.arctanh(np.asarray(act, np.float64))
    expected = stats.norm(mean, std).logpdf(before).sum() - np.log(1 - np.asarray(act, np.float64) ** 2).sum()
    assert float(log_prob[0]) == pytest.approx(expected, rel=1e-4)


def test_the_squashed_density_integrates_to_one():
    noise = jnp.linspace(-8, 8, 4001)[:, None]
    act, log_prob = sample_action(jnp.full((4001, 1), 0.3), jnp.full((4001, 1), 0.6), noise)
    assert np.trapezoid(np.exp(np.asarray(log_prob, np.float64)), np.asarray(act[:, 0], np.float64)) == pytest.approx(
        1.0, abs=1e-3
    )


def test_extreme_actions_have_finite_log_probability_and_gradient():
    value, slope = jax.value_and_grad(lambda n: sample_action(jnp.zeros(1), jnp.ones(1), n)[1])(jnp.array([200.0]))
    assert np.isfinite(value) and np.isfinite(slope).all()


def test_a_network_is_the_chain_it_says():
    one = Dynamics(TINY.model, 3, 2, jr.key(0))
    given = np.array([[0.1, -0.4, 0.8, 0.5, -0.5], [1.0, 0.0, -2.0, 0.3, 0.9]])
    x = given
    for i, layer in enumerate(one.mlp.layers):
        x = x @ np.asarray(layer.weight, np.float64) + np.asarray(layer.bias, np.float64)
        if i < 3:
            x = x / (1 + np.exp(-x))
            x = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + TINY.model.norm_eps[i])
    mean, log_noise = one(jnp.asarray(given, jnp.float32))
    np.testing.assert_allclose(mean, x, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(log_noise, one.log_noise[None])


def test_noise_that_depends_on_the_state_is_the_other_half_of_the_output():
    config = dataclasses.replace(TINY.model, noise="state")
    one = Dynamics(config, 3, 2, jr.key(0))
    one = eqx.tree_at(lambda d: d.log_noise, one, jnp.array([-1.0, 0.0, 1.0, 2.0]))
    inputs = 3.0 * jr.normal(jr.key(1), (50, 5))
    out = np.asarray(one.mlp(inputs))
    mean, log_noise = one(inputs)
    assert out.shape == (50, 8)
    np.testing.assert_array_equal(mean, out[:, :4])
    deviation = np.asarray(log_noise) - np.array([-1.0, 0.0, 1.0, 2.0])
    np.testing.assert_allclose(deviation, 3.0 * np.tanh(out[:, 4:] / 3.0), rtol=1e-4, atol=1e-5)
    assert np.abs(deviation).max() < 3.0 and deviation.std() > 0.1


def test_critics_start_in_the_middle_and_members_differ():
    critics = ensemble(lambda k: Critic(TINY.critic, 3, 2, k), 3, jr.key(0))
    assert float(jax.tree.map(lambda x: x[0], critics)(jnp.ones((1, 5)))[0]) == 0.0
    first = critics.mlp.layers[0].weight
    assert not np.allclose(first[0], first[1])


def test_orthogonal_matrices_are_drawn_without_lapack():
    """Which hangs under `vmap` on some CPUs; and as uniformly as by QR: every entry has the variance 1 / size."""
    draw = jax.jit(jax.vmap(lambda key: orthogonal(3, 5, key)))
    keys = jr.split(jr.key(0), 4000)
    assert "lapack" not in draw.lower(keys).as_text()
    drawn = np.asarray(draw(keys))
    np.testing.assert_allclose(drawn @ drawn.swapaxes(1, 2), np.tile(np.eye(3), (4000, 1, 1)), atol=1e-5)
    np.testing.assert_allclose(np.mean(drawn**2, axis=0), 0.2, atol=0.02)
    np.testing.assert_allclose(np.mean(drawn, axis=0), 0.0, atol=0.03)


def test_the_actor_starts_orthogonal_and_wide():
    actor = random_actor(20, 2)
    weight = np.asarray(actor.mlp.layers[1].weight)
    np.testing.assert_allclose(weight @ weight.T, np.eye(weight.shape[0]), atol=1e-5)
    _, std = mean_and_std(actor(jnp.zeros((1, 20))))
    np.testing.assert_allclose(std, np.log(2.0) + 1e-5, rtol=1e-5)
