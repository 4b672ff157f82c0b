import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy import stats

from doublehorizon.algorithm import model_fit as fits
from doublehorizon.algorithm import replay_buffer as replays
from doublehorizon.algorithm.agent import _with_statistics
from doublehorizon.algorithm.ensemble import ensemble
from doublehorizon.algorithm.networks import Dynamics
from doublehorizon.algorithm.normalizer import identity
from doublehorizon.algorithm.types import Budget, Transition
from doublehorizon.algorithm.world_model import WorldModel
from worlds import TINY, budget


def test_the_likelihood_is_the_gaussian_one():
    rng = np.random.default_rng(0)
    mean, target = rng.normal(size=(2, 4, 3)).astype(np.float32)
    log_noise = rng.normal(size=3).astype(np.float32)
    constant = 3 * 0.5 * np.log(2 * np.pi)
    expected = -stats.norm(mean, np.exp(log_noise)).logpdf(target).sum(-1) - constant
    found = fits.negative_log_likelihood(jnp.asarray(mean), jnp.asarray(log_noise)[None], jnp.asarray(target), 1e-3)
    np.testing.assert_allclose(found.sum(-1), expected, rtol=1e-4)


def test_below_the_least_noise_the_likelihood_no_longer_shrinks_it():
    def loss(log_noise):
        zero = jnp.zeros((1, 1))
        return fits.negative_log_likelihood(zero, log_noise[None, None], zero, 1e-3)[0, 0]

    assert float(jax.grad(loss)(jnp.log(2e-3))) == pytest.approx(1.0)
    assert float(jax.grad(loss)(jnp.log(0.5e-3))) == 0.0


def test_the_score_is_that_of_one_gaussian_with_the_members_disagreement():
    mean = jnp.array([[[1.0]], [[3.0]]])  # two members, one row, one dimension
    log_noise = jnp.log(jnp.array([[[1.0]], [[4.0]]]))  # geometric mean 2, so a variance of 4
    variance = 4.0 + 2.0  # unbiased variance of 1 and 3
    expected = 0.5 * ((2.0 - 5.0) ** 2 / variance + np.log(variance))
    assert float(fits.ensemble_score(mean, log_noise, jnp.array([[5.0]]))[0, 0]) == pytest.approx(expected, rel=1e-5)


def test_scores_add_up_dimensions_but_for_rewards_that_are_learnt_with_an_end():
    mean, log_noise = jnp.zeros((2, 2, 3)), jnp.zeros((2, 1, 3))
    score = fits.ensemble_score(mean, log_noise, jnp.tile(jnp.array([[1.0, 2.0, 3.0]]), (2, 1)))
    np.testing.assert_allclose(fits._total(score, None), 0.5 * (1 + 4 + 9))
    np.testing.assert_allclose(fits._total(score, jnp.array([1.0, 0.0])), [0.5 * (1 + 4 + 9), 0.5 * (4 + 9)])


def test_the_paired_test_is_scipys_z_test_over_the_rows_that_count():
    rng = np.random.default_rng(0)
    best, new = rng.normal(size=(2, 500)).astype(np.float32)
    d = (new - best)[:400]
    expected = stats.norm.cdf(d.mean() * np.sqrt(400) / d.std(ddof=1))
    found = fits.improvement_p(jnp.asarray(new), jnp.asarray(best), jnp.asarray(400))
    assert float(found) == pytest.approx(expected, rel=1e-4)
    assert float(fits.improvement_p(jnp.asarray(best), jnp.asarray(best), jnp.asarray(400))) == pytest.approx(0.5)


def test_validation_rows_are_distinct_and_cover_all_stretches():
    chance = jr.uniform(jr.key(0), (64,))
    for available in (64, 65, 100, 127, 128, 1000, 2_000_000):
        chosen = np.asarray(fits.spread_out(chance, jnp.asarray(available)))
        assert len(set(chosen.tolist())) == 64 and chosen.min() >= 0 and chosen.max() < available
        assert np.all(np.abs(chosen * 64 / available - np.arange(64)) <= 1 + 64 / available)
    first, last = (np.asarray(fits.spread_out(jnp.full(64, u), jnp.asarray(1000))) for u in (0.0, 0.9999))
    np.testing.assert_array_equal(first, np.arange(64) * 1000 // 64)
    np.testing.assert_array_equal(last, np.arange(1, 65) * 1000 // 64 - 1)
    few = np.asarray(fits.spread_out(chance, jnp.asarray(10)))
    np.testing.assert_array_equal(few[:10], np.arange(10))
    assert few.max() == 9


def problem(num_seeds: int, num_rows: int = 200):
    """Replays of a linear world, and untrained models with their statistics."""
    key_obs, key_act, key_store, key_model = jr.split(jr.key(0), 4)

    def one(seed):
        obs = jr.normal(jr.fold_in(key_obs, seed), (num_rows, 3))
        act = jr.uniform(jr.fold_in(key_act, seed), (num_rows, 2), minval=-1.0)
        next_obs = obs + 0.1 * jnp.concatenate([act, obs[:, :1]], axis=1)
        rows = Transition(obs, act, obs[:, 0] + act[:, 0], next_obs, jnp.zeros(num_rows))
        empty = replays.empty(num_rows, 3, 2, TINY.model.members, TINY.fit.held_out_every)
        replay = replays.add(empty, rows, jr.fold_in(key_store, seed))
        make = lambda k: Dynamics(TINY.model, 3, 2, k)  # noqa: E731
        members = ensemble(make, TINY.model.members, jr.fold_in(key_model, seed))
        untrained = WorldModel(members, identity(3), identity(4))
        return replay, _with_statistics(TINY, untrained, replay, jnp.asarray(num_rows))

    return jax.vmap(one)(jnp.arange(num_seeds))


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
@pytest.mark.parametrize("epochs", [[3, 9, 1, 7, 5, 2], [4, 4, 4, 4], [1], [2, 8]])
def test_seeds_stop_one_by_one_and_keep_their_places(monkeypatch, epochs, side_by_side):
    monkeypatch.setattr(fits, "on_gpu", lambda: side_by_side)

    # in place of an epoch: count, and stop at the seed's own limit, which is hidden in its data
    def epoch(config, budget, data, state):
        del config, budget
        error = state.best_error + data.reward_noise
        new = eqx.tree_at(lambda s: (s.epoch, s.best_error), state, (state.epoch + 1, error))
        return eqx.tree_at(lambda s: s.active, new, state.active & (new.epoch < data.reward_noise))

    num_seeds = len(epochs)
    replay, world = problem(num_seeds)
    some = limits(1, 1)
    data = jax.vmap(lambda r, w: fits._prepare(TINY, some, r, w, jr.key(0)))(replay, world)
    data = eqx.tree_at(lambda d: d.reward_noise, data, jnp.asarray(epochs, jnp.float32))
    state = jax.vmap(lambda d, w: fits._begin(TINY, some, d, w.members, jr.key(0)))(data, world)
    state = eqx.tree_at(lambda s: s.best_error, state, jnp.zeros(num_seeds))
    monkeypatch.setattr(fits, "_epoch", epoch)
    done = fits._run(TINY, some, data, state)
    assert done.epoch.tolist() == epochs and not done.active.any()
    np.testing.assert_allclose(done.best_error, np.square(epochs))
    for kept, given in zip(jax.tree.leaves(done.members), jax.tree.leaves(world.members), strict=True):
        np.testing.assert_array_equal(kept, given)


def test_weights_decide_how_much_a_row_counts():
    replay, world = problem(1)
    one_replay, one_world = jax.tree.map(lambda x: x[0], (replay, world))
    data = fits._prepare(TINY, limits(1, 1), one_replay, one_world, jr.key(0))
    members = one_world.members
    opt_state = fits._optimizer(TINY).init(members)

    silent = eqx.tree_at(lambda d: d.weight, data, data.weight.at[:, 0].set(0.0))
    batch = jax.tree.map(lambda x: x[0], fits._draw(TINY, limits(1, 1), silent, jr.key(5)))
    stepped, _ = fits._gradient_step(TINY, members, opt_state, batch)
    change = jax.tree.map(lambda a, b: a - b, stepped, members)
    first, second = (jax.tree.map(lambda x, m=m: x[m], change) for m in (0, 1))
    # member 0 has no weight on any row: only its weight decay moves it
    decay = -TINY.fit.learning_rate * TINY.model.weight_decay[0] * members.mlp.layers[0].weight[0]
    np.testing.assert_allclose(first.mlp.layers[0].weight, decay, atol=2e-7)  # a float32 ulp of the weights
    assert float(jnp.max(jnp.abs(second.mlp.layers[0].weight))) > 100 * float(jnp.max(jnp.abs(decay)))


def numbered(capacity: int, num_rows: int) -> tuple:
    """A replay whose rows are numbered by their observation, what a fit makes of it, and which rows are held out."""
    obs = jnp.arange(float(capacity))[:, None] * jnp.ones((1, 3))
    rows = Transition(obs, jnp.zeros((capacity, 2)), obs[:, 0], obs, jnp.zeros(capacity))
    replay = replays.add(replays.empty(capacity, 3, 2, 2, 5), rows, jr.key(0))
    world = jax.tree.map(lambda x: x[0], problem(1)[1])
    world = eqx.tree_at(lambda w: (w.obs_normalizer, w.target_normalizer), world, (identity(3), identity(4)))
    data = fits._prepare(TINY, budget(num_rows, 2), replay, world, jr.key(1))
    held_out = np.asarray(replays.validation_rows(replay, jnp.arange(capacity // 5)))
    return replay, data, held_out


def test_held_out_rows_are_validated_on_and_never_trained_on():
    replay, data, held_out = numbered(100, 100)
    trained, validated = (np.asarray(x.inputs[:, 0]).astype(int) for x in (data.training, data.validation))
    assert set(trained) == set(range(100)) - set(held_out) and set(validated) == set(held_out)
    np.testing.assert_array_equal(data.weight, replay.weight[trained])  # rows keep their weights
    np.testing.assert_array_equal(data.training.target[:, 0], trained)  # and their rewards


def test_minibatches_are_drawn_from_all_stored_rows_and_no_others():
    *_, data, held_out = numbered(200, 50)
    batches = jax.vmap(lambda key: fits._draw(TINY, budget(50, 2), data, key))(jr.split(jr.key(2), 100))
    drawn = np.asarray(batches.examples.inputs[..., 0]).astype(int)
    assert set(drawn.ravel()) == set(range(50)) - set(held_out)
    assert len(np.unique(batches.dropout)) == batches.dropout.size  # each row of each member drops other units


def one_step(config, change=lambda batch: batch):
    """The change of the members in one gradient step on rows that they already predict."""
    world = jax.tree.map(lambda x: x[0], problem(1)[1])
    inputs, members = jr.normal(jr.key(3), (16, 5)), world.members
    first = jax.tree.map(lambda x: x[0], members)
    members = jax.tree.map(lambda x: jnp.stack([x, x]), first)
    examples = fits.Examples(inputs, first(inputs)[0])
    seeds = jnp.arange(32, dtype=jnp.uint32).reshape(2, 16)
    batch = change(fits.Minibatches(examples, jnp.ones((16, 2)), jnp.zeros((2, 16)), seeds))
    after, _ = fits._gradient_step(config, members, fits._optimizer(config).init(members), batch)
    return jax.tree.map(lambda a, b: a - b, after, members)


def test_the_noise_of_the_reward_is_on_the_reward():
    noisy = one_step(TINY, lambda batch: eqx.tree_at(lambda b: b.noise, batch, jnp.full((2, 16), 30.0)))
    # what is predicted well needs less noise, the reward more
    assert np.all(noisy.log_noise[:, 0] > 0) and np.all(noisy.log_noise[:, 1:] < 0)


def test_a_fit_drops_units_by_the_seeds_of_its_rows():
    config = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, dropout=(0.5, 0.5, 0.5)))
    change = one_step(config).mlp.layers[1].weight
    assert not np.allclose(change[0], change[1])  # the members are the same, their seeds are not
    other = one_step(config, lambda batch: eqx.tree_at(lambda b: b.dropout, batch, batch.dropout + 999))
    assert not np.allclose(change, other.mlp.layers[1].weight)


def test_an_improvement_starts_the_patience_anew():
    replay, world = problem(1)
    _, metrics = fit(FAST, limits(3, 40), replay, world, jr.split(jr.key(1), 1))
    assert int(metrics["model/epochs"][0]) > 20  # it goes on improving, and so for longer than its patience


def test_decay_pulls_each_layer_and_the_noise_towards_zero():
    model = dataclasses.replace(TINY.model, weight_decay=(1.0, 2.0, 3.0, 4.0), noise_decay=5.0)
    config = dataclasses.replace(TINY, model=model)
    members = jax.tree.map(lambda x: x[0], problem(1)[1]).members
    members = eqx.tree_at(lambda m: m.log_noise, members, jnp.ones_like(members.log_noise))
    zero = jax.tree.map(jnp.zeros_like, members)
    optimizer = fits._optimizer(config)
    updates, _ = optimizer.update(zero, optimizer.init(members), members)
    for rate, layer, update in zip((1.0, 2.0, 3.0, 4.0), members.mlp.layers, updates.mlp.layers, strict=True):
        np.testing.assert_allclose(update.weight, -config.fit.learning_rate * rate * layer.weight, rtol=1e-5)
        np.testing.assert_allclose(update.bias, -config.fit.learning_rate * rate * layer.bias, rtol=1e-5)
    np.testing.assert_allclose(updates.log_noise, -5.0 * config.fit.learning_rate, rtol=1e-5)


def test_only_held_out_rows_that_are_stored_count_in_a_validation():
    replay, world = jax.tree.map(lambda x: x[0], problem(1))
    data = fits._prepare(TINY, budget(50, 2), replay, world, jr.key(0))  # ten of them, in a chunk of sixteen
    score, error = fits._validate(TINY, budget(50, 2), data.validation, world.members)
    inputs, target = data.validation.inputs[:10], data.validation.target[:10]
    each = [jax.tree.map(lambda x, k=k: x[k], world.members)(inputs) for k in range(2)]
    mean, log_noise = (jnp.stack(x) for x in zip(*each, strict=True))
    expected = fits.ensemble_score(mean, log_noise, target).sum(-1)
    np.testing.assert_allclose(score[:10], expected, rtol=1e-4)
    np.testing.assert_array_equal(score[10:], 0.0)
    np.testing.assert_allclose(error, np.mean((np.mean(mean, axis=0) - target) ** 2), rtol=1e-4)
