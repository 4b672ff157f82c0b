"""Fits that last until held-out rows say so."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy import stats

from doublehorizon.algorithm import early_stopping as fits
from doublehorizon.algorithm import replay_buffer as replays
from doublehorizon.algorithm.model_fit import _draw, ensemble_score
from doublehorizon.algorithm.normalizer import identity
from doublehorizon.algorithm.types import Budget, Transition
from linear_world import problem
from worlds import TINY, budget


def test_the_paired_test_is_scipys_z_test_over_the_rows_that_count():
    rng = np.random.default_rng(0)
    best, new = rng.normal(size=(2, 500)).astype(np.float32)
    d = (new - best)[:400]
    expected = stats.norm.cdf(d.mean() * np.sqrt(400) / d.std(ddof=1))
    found = fits.improvement_p(jnp.asarray(new), jnp.asarray(best), jnp.asarray(400))
    assert float(found) == pytest.approx(expected, rel=1e-4)
    assert float(fits.improvement_p(jnp.asarray(best), jnp.asarray(best), jnp.asarray(400))) == pytest.approx(0.5)


def test_validation_rows_are_distinct_and_cover_all_stretches():
    spread_out = jax.jit(fits.spread_out)
    chance = np.asarray(jr.uniform(jr.key(0), (64,)))
    for available in (64, 65, 100, 127, 128, 1000, 2_000_000):
        chosen = np.asarray(spread_out(chance, available))
        assert len(set(chosen.tolist())) == 64 and chosen.min() >= 0 and chosen.max() < available
        assert np.all(np.abs(chosen * 64 / available - np.arange(64)) <= 1 + 64 / available)
    first, last = (np.asarray(spread_out(np.full(64, u, np.float32), 1000)) for u in (0.0, 0.9999))
    np.testing.assert_array_equal(first, np.arange(64) * 1000 // 64)
    np.testing.assert_array_equal(last, np.arange(1, 65) * 1000 // 64 - 1)
    few = np.asarray(spread_out(chance, 10))
    np.testing.assert_array_equal(few[:10], np.arange(10))
    assert few.max() == 9


def limits(patience: int, max_epochs: int) -> Budget:
    return budget(200, 2, patience, max_epochs)


fit = eqx.filter_jit(fits.fit)
FAST = dataclasses.replace(TINY, fit=dataclasses.replace(TINY.fit, learning_rate=1e-2))


def test_a_fit_learns_the_world_and_returns_its_best_parameters():
    replay, world = problem(1)
    keys = jr.split(jr.key(1), 1)
    _, before = fit(FAST, limits(0, 0), replay, world, keys)
    fitted, after = fit(FAST, limits(100, 150), replay, world, keys)
    assert float(after["model/validation_rmse"][0]) < 0.25 * float(before["model/validation_rmse"][0])
    # what is returned scores exactly what was reported: the best parameters, not the last ones
    _, again = fit(FAST, limits(0, 0), replay, fitted, keys)
    np.testing.assert_allclose(again["model/validation_score"], after["model/validation_score"], rtol=1e-5)


def test_a_fit_stops_after_patience_plus_one_epochs_without_improvement():
    replay, world = problem(1)
    # steps so large that no epoch improves
    wild = dataclasses.replace(TINY, fit=dataclasses.replace(TINY.fit, learning_rate=100.0))
    fitted, metrics = fit(wild, limits(4, 50), replay, world, jr.split(jr.key(1), 1))
    assert int(metrics["model/epochs"][0]) == 5
    for kept, given in zip(jax.tree.leaves(fitted.members), jax.tree.leaves(world.members), strict=True):
        np.testing.assert_array_equal(kept, given)


def test_a_fit_stops_at_its_cap():
    replay, world = problem(1)
    _, metrics = fit(TINY, limits(50, 7), replay, world, jr.split(jr.key(1), 1))
    assert int(metrics["model/epochs"][0]) == 7


def test_each_seed_fits_as_it_would_alone():
    replay, world = problem(3)
    keys = jr.split(jr.key(1), 3)
    _, together = fit(TINY, limits(100, 3), replay, world, keys)
    _, alone = fit(TINY, limits(100, 3), *jax.tree.map(lambda x: x[1:2], (replay, world)), keys[1:2])
    for name, value in alone.items():
        np.testing.assert_allclose(value[0], together[name][1], rtol=1e-4, atol=1e-5)
    assert len(set(np.asarray(together["model/validation_score"]).tolist())) == 3


@pytest.mark.parametrize("side_by_side", [True, False])
@pytest.mark.parametrize("cases", [[[3, 9, 1, 7, 5, 2], [4, 4, 4, 4, 4, 4]], [[1]], [[2, 8]]])
def test_seeds_stop_one_by_one_and_keep_their_places(monkeypatch, cases, side_by_side):
    monkeypatch.setattr(fits, "on_gpu", lambda: side_by_side)

    # in place of an epoch: count, and stop at the seed's own limit, which is hidden in its data
    def epoch(config, budget, data, state):
        del config, budget
        error = state.best_error + data.reward_noise
        new = eqx.tree_at(lambda s: (s.epoch, s.best_error), state, (state.epoch + 1, error))
        return eqx.tree_at(lambda s: s.active, new, state.active & (new.epoch < data.reward_noise))

    monkeypatch.setattr(fits, "_epoch", epoch)
    num_seeds = len(cases[0])
    replay, world = problem(num_seeds)

    @jax.jit
    def run(epochs):
        some = limits(1, 1)
        data = jax.vmap(lambda r, w: fits._prepare(TINY, some, r, w, jr.key(0)))(replay, world)
        data = eqx.tree_at(lambda d: d.reward_noise, data, epochs)
        state = jax.vmap(lambda d, w: fits._begin(TINY, some, d, w.members, jr.key(0)))(data, world)
        state = eqx.tree_at(lambda s: s.best_error, state, jnp.zeros(num_seeds))
        done = fits._run(TINY, some, data, state)
        return done.epoch, done.active, done.best_error, done.members

    for epochs in cases:
        count, active, error, members = run(np.array(epochs, np.float32))
        assert count.tolist() == epochs and not active.any()
        np.testing.assert_allclose(error, np.square(epochs))
        for kept, given in zip(jax.tree.leaves(members), jax.tree.leaves(world.members), strict=True):
            np.testing.assert_array_equal(kept, given)


@eqx.filter_jit
def numbered(capacity: int, num_rows: int) -> tuple:
    """A replay whose rows are numbered by their observation, what a fit makes of it, and which rows are held out."""
    obs = jnp.arange(float(capacity))[:, None] * jnp.ones((1, 3))
    rows = Transition(obs, jnp.zeros((capacity, 2)), obs[:, 0], obs, jnp.zeros(capacity))
    replay = replays.add(replays.empty(capacity, 3, 2, 2, 5), rows, jr.key(0))
    world = jax.tree.map(lambda x: x[0], problem(1)[1])
    world = eqx.tree_at(lambda w: (w.obs_normalizer, w.target_normalizer), world, (identity(3), identity(4)))
    data = fits._prepare(TINY, budget(num_rows, 2), replay, world, jr.key(1))
    return replay, data, replays.validation_rows(replay, jnp.arange(capacity // 5))


def test_held_out_rows_are_validated_on_and_never_trained_on():
    replay, data, held_out = numbered(100, 100)
    trained, validated = (np.asarray(x.inputs[:, 0]).astype(int) for x in (data.training, data.validation))
    held_out = set(np.asarray(held_out).tolist())
    assert set(trained) == set(range(100)) - held_out and set(validated) == held_out
    np.testing.assert_array_equal(data.weight, replay.weight[trained])  # rows keep their weights
    np.testing.assert_array_equal(data.training.target[:, 0], trained)  # and their rewards


def test_minibatches_are_drawn_from_all_stored_rows_and_no_others(monkeypatch):
    *_, data, held_out = numbered(200, 50)
    drawn = []

    def train_epoch(config, budget, draw_examples, reward_noise, carry, key):
        batches = jax.vmap(lambda key: _draw(config, draw_examples, reward_noise, key))(jr.split(key, 100))
        drawn.append(batches)
        return carry

    monkeypatch.setattr(fits, "train_epoch", train_epoch)
    world = jax.tree.map(lambda x: x[0], problem(1)[1])
    fits._epoch(TINY, budget(50, 2), data, fits._begin(TINY, budget(50, 2), data, world.members, jr.key(2)))
    rows = np.asarray(drawn[0].examples.inputs[..., 0]).astype(int)
    assert set(rows.ravel()) == set(range(50)) - set(np.asarray(held_out).tolist())
    assert len(np.unique(drawn[0].dropout)) == drawn[0].dropout.size  # each row of each member drops other units


def test_an_improvement_starts_the_patience_anew():
    replay, world = problem(1)
    _, metrics = fit(FAST, limits(3, 40), replay, world, jr.split(jr.key(1), 1))
    assert int(metrics["model/epochs"][0]) > 20  # it goes on improving, and so for longer than its patience


def test_only_held_out_rows_that_are_stored_count_in_a_validation():
    replay, world = jax.tree.map(lambda x: x[0], problem(1))

    @jax.jit
    def validated():
        data = fits._prepare(TINY, budget(50, 2), replay, world, jr.key(0))  # ten of them, in a chunk of sixteen
        return data, *fits._validate(TINY, budget(50, 2), data.validation, world.members)

    data, score, error = validated()
    inputs, target = data.validation.inputs[:10], data.validation.target[:10]
    each = [jax.tree.map(lambda x, k=k: x[k], world.members)(inputs) for k in range(2)]
    mean, log_noise = (jnp.stack(x) for x in zip(*each, strict=True))
    expected = ensemble_score(mean, log_noise, target).sum(-1)
    np.testing.assert_allclose(score[:10], expected, rtol=1e-4)
    np.testing.assert_array_equal(score[10:], 0.0)
    np.testing.assert_allclose(error, np.mean((np.mean(mean, axis=0) - target) ** 2), rtol=1e-4)
