"""The hand-written gradient against JAX's own, and the GPU's kernels, interpreted, against plain arithmetic."""

import itertools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from doublehorizon.algorithm import kernels
from doublehorizon.algorithm.kernels import Activation, MlpSpec, mlp
from doublehorizon.algorithm.networks import dropout_seeds

SIZES = (5, 16, 16, 16, 3)
PLAN = MlpSpec((Activation(0.3, 1.0, 0), Activation(0.2, 0.1, 77), Activation(0.0, None, 99)), "float32")


def network(key):
    keys = jr.split(key, 8)
    pairs = list(itertools.pairwise(SIZES))
    weights = tuple(jr.normal(k, pair) / pair[0] ** 0.5 for k, pair in zip(keys[:4], pairs, strict=True))
    return weights, tuple(0.3 * jr.normal(k, pair[1:]) for k, pair in zip(keys[4:], pairs, strict=True))


def run(spec, num_rows=16, members=2):
    """Outputs of two members for the same rows, and all slopes of a function of them."""
    weights, biases = jax.vmap(network)(jr.split(jr.key(0), members))
    x = jr.normal(jr.key(1), (num_rows, SIZES[0]))
    seeds = dropout_seeds(members * num_rows, jr.key(2)).reshape(members, num_rows)

    def total(weights, biases, x):
        out = jax.vmap(lambda w, b, s: mlp(spec, w, b, x, s))(weights, biases, seeds)
        return 1e-3 * jnp.sum(jnp.sin(out)), out

    slopes, out = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(weights, biases, x)
    return jax.tree.leaves((out, slopes))


def chain(spec, weights, biases, x, seeds):
    """The same network without the gradient rule."""
    for activation, weight, bias in zip(spec.activations, weights, biases, strict=False):
        x = kernels._activate(activation, x @ weight + bias[None], seeds)
    return x @ weights[-1] + biases[-1][None]


def test_the_hand_written_gradient_is_the_true_one(monkeypatch):
    ours = run(PLAN)
    monkeypatch.setitem(globals(), "mlp", chain)
    for a, b in zip(ours, run(PLAN), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("storage", "tolerance"), [("float32", 1e-5), ("float16", 5e-3)])
def test_the_gpu_kernels_compute_the_same(monkeypatch, storage, tolerance):
    plain = run(PLAN)
    monkeypatch.setattr(kernels, "interpret", True)
    for a, b in zip(run(PLAN._replace(storage=storage)), plain, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * float(jnp.max(jnp.abs(b))))


def test_rows_that_make_no_whole_tile_are_computed_plainly(monkeypatch):
    plain = run(PLAN, num_rows=5)
    monkeypatch.setattr(kernels, "interpret", True)
    for a, b in zip(run(PLAN, num_rows=5), plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_dropout_drops_its_share_independently_of_row_and_unit():
    width, rows, rate, eps = 64, 4096, 0.25, 1e-2
    z = jr.normal(jr.key(0), (width,)) + 3.0
    seeds = dropout_seeds(rows, jr.key(2))
    out = np.asarray(kernels._activate(Activation(rate, eps, 5), jnp.tile(z[None], (rows, 1)), seeds))
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


def test_layers_drop_different_units():
    seeds, z = dropout_seeds(64, jr.key(0)), jnp.ones((64, 64))
    masks = [np.asarray(kernels._dropped(Activation(0.5, None, salt), z, seeds)[1]) for salt in (0, 0x632BE5AB)]
    assert abs(np.corrcoef(masks[0].ravel(), masks[1].ravel())[0, 1]) < 0.05


@pytest.mark.parametrize("size", [3e4, 1e6, 1e30])
def test_float16_survives_inputs_that_it_cannot_hold(monkeypatch, size):
    """As an imagined state has that is far from all real ones. Other rows do not notice."""
    monkeypatch.setattr(kernels, "interpret", True)
    weights, biases = network(jr.key(0))
    x = jr.normal(jr.key(1), (16, SIZES[0]))
    seeds = dropout_seeds(16, jr.key(2))
    spec = PLAN._replace(storage="float16")

    def out(x):
        return mlp(spec, weights, biases, x, seeds)

    far = out(x.at[0].multiply(size))
    assert jnp.isfinite(far).all()
    np.testing.assert_array_equal(far[1:], out(x)[1:])
    slopes = jax.grad(lambda w, b, x: jnp.sum(jnp.sin(mlp(spec, w, b, x, seeds))), argnums=(0, 1, 2))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes(weights, biases, x.at[0].multiply(size))))
