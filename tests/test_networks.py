import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy import stats

from doublehorizon import kernels
from doublehorizon.kernels import activate
from doublehorizon.networks import Critic, Dynamics, dropout_seeds, ensemble, sample_action
from worlds import TINY, random_actor


def test_log_probability_agrees_with_the_change_of_variables():
    actor = random_actor(3, 2)
    obs, noise = jnp.array([0.3, -1.0, 2.0]), jnp.array([0.7, -1.1])
    act, log_prob = sample_action(actor, obs, noise)
    mean, std = actor(obs)
    # by a second method: density of the Gaussian at arctanh(act), times |d arctanh / d act|
    before = np.arctanh(np.asarray(act, np.float64))
    expected = stats.norm(mean, std).logpdf(before).sum() - np.log(1 - np.asarray(act, np.float64) ** 2).sum()
    assert float(log_prob) == pytest.approx(expected, rel=1e-4)


def test_the_squashed_density_integrates_to_one():
    actor = random_actor(1, 1, seed=3)
    noise = jnp.linspace(-8, 8, 4001)[:, None]
    act, log_prob = jax.vmap(sample_action, in_axes=(None, None, 0))(actor, jnp.zeros(1), noise)
    assert np.trapezoid(np.exp(np.asarray(log_prob, np.float64)), np.asarray(act[:, 0], np.float64)) == pytest.approx(
        1.0, abs=1e-3
    )


def test_extreme_actions_have_finite_log_probability_and_gradient():
    actor = random_actor(1, 1)
    value, slope = jax.value_and_grad(lambda n: sample_action(actor, jnp.zeros(1), n)[1])(jnp.array([200.0]))
    assert np.isfinite(value) and np.isfinite(slope).all()


def test_a_network_is_the_chain_it_says():
    make = lambda k: Dynamics(TINY.model, 3, 2, k)  # noqa: E731
    one = make(jr.key(0))
    x = np.array([0.1, -0.4, 0.8, 0.5, -0.5], np.float64)
    for i, layer in enumerate(one.mlp.layers):
        x = x @ np.asarray(layer.weight, np.float64) + np.asarray(layer.bias, np.float64)
        if i < 3:
            x = x / (1 + np.exp(-x))
            x = (x - x.mean()) / np.sqrt(x.var() + TINY.model.norm_eps[i])
    np.testing.assert_allclose(one(jnp.array([0.1, -0.4, 0.8]), jnp.array([0.5, -0.5])), x, rtol=1e-4, atol=1e-5)


def test_dropout_drops_its_share_independently_of_row_and_unit():
    width, rows, rate, eps = 64, 4096, 0.25, 1e-2
    z = jr.normal(jr.key(0), (width,)) + 3.0
    seeds = dropout_seeds(rows, jr.key(2))
    out = np.asarray(jax.vmap(activate, in_axes=(None, 0, None, None))(z, seeds, rate, eps))
    # a dropped unit is the only one with SiLU(0) = 0, so it lies lowest in its row
    dropped = np.isclose(out, out.min(axis=1, keepdims=True), atol=1e-5)
    assert dropped.mean() == pytest.approx(rate, abs=0.005)
    assert np.abs(dropped.mean(axis=0) - rate).max() < 0.04
    assert np.abs(np.corrcoef(dropped.T) - np.eye(width)).max() < 0.09  # units
    assert np.abs(np.corrcoef(dropped[:64]) - np.eye(64)).max() < 0.65  # rows
    # what is kept is scaled up, so that the mean stays
    before = np.where(dropped[0], 0.0, np.asarray(z, np.float64) / (1 - rate))
    hidden = before / (1 + np.exp(-before))
    np.testing.assert_allclose(out[0], (hidden - hidden.mean()) / np.sqrt(hidden.var() + eps), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_the_hand_written_gradient_is_the_true_one(rate):
    (z, slope), seed = jr.normal(jr.key(0), (2, 16)), jnp.uint32(7)
    _, ours = jax.vjp(lambda z: activate(z, seed, rate, 0.1), z)
    _, derived = jax.vjp(lambda z: kernels._forward(rate, 0.1, seed, z), z)
    np.testing.assert_allclose(ours(slope)[0], derived(slope)[0], rtol=1e-4, atol=1e-6)


def test_the_gpu_kernel_computes_the_same():
    z, slope = jr.normal(jr.key(0), (2, 5, 16))
    seeds = dropout_seeds(5, jr.key(1))
    for function, rows in ((kernels._forward, (z,)), (kernels._backward, (z, slope))):
        plain = functools.partial(function, 0.3, 0.1)
        kernel = functools.partial(kernels._kernel, plain, interpret=True)
        np.testing.assert_allclose(jax.vmap(kernel)(seeds, *rows), jax.vmap(plain)(seeds, *rows), rtol=1e-5, atol=1e-6)


def test_critics_start_in_the_middle_and_members_differ():
    critics = ensemble(lambda k: Critic(TINY.critic, 3, 2, k), 3, jr.key(0))
    assert float(jax.tree.map(lambda x: x[0], critics)(jnp.ones(3), jnp.ones(2))) == 0.0
    first = critics.mlp.layers[0].weight
    assert not np.allclose(first[0], first[1])


def test_the_actor_starts_orthogonal_and_wide():
    actor = random_actor(20, 2)
    weight = np.asarray(actor.mlp.layers[1].weight)
    np.testing.assert_allclose(weight @ weight.T, np.eye(weight.shape[0]), atol=1e-5)
    _, std = actor(jnp.zeros(20))
    np.testing.assert_allclose(std, np.log(2.0) + 1e-5, rtol=1e-5)
