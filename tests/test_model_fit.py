import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy import stats

from doublehorizon.algorithm import model_fit as fits
from doublehorizon.algorithm.end_rewards import unknown_end_rewards
from doublehorizon.config_json import changed
from linear_world import problem
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
    np.testing.assert_allclose(fits.row_totals(score, None), 0.5 * (1 + 4 + 9))
    np.testing.assert_allclose(fits.row_totals(score, jnp.array([1.0, 0.0])), [0.5 * (1 + 4 + 9), 0.5 * (4 + 9)])


def test_weights_decide_how_much_a_row_counts():
    members = jax.tree.map(lambda x: x[0], problem(1)[1].members)

    @jax.jit
    def change():
        replay, world = jax.tree.map(lambda x: x[0], problem(1))
        opt_state = fits.begin_optimizer(TINY, members)
        examples = jax.tree.map(lambda x: x[:32].reshape(2, 16, -1), fits.as_examples(TINY, world, replay.rows))
        weight = jnp.ones((2, 16, 2)).at[..., 0].set(0.0)
        batches = fits._draw(TINY, lambda key, shape: (examples, weight), jnp.zeros(()), jr.key(5))
        batch = jax.tree.map(lambda x: x[0], batches)
        stepped, _ = fits._gradient_step(TINY, members, opt_state, batch)
        return jax.tree.map(lambda a, b: a - b, stepped, members)

    first, second = (jax.tree.map(lambda x, m=m: np.asarray(x)[m], change()) for m in (0, 1))
    # member 0 has no weight on any row: only its weight decay moves it
    decay = -TINY.fit.learning_rate * TINY.model.weight_decay[0] * members.mlp.layers[0].weight[0]
    np.testing.assert_allclose(first.mlp.layers[0].weight, decay, atol=2e-7)  # a float32 ulp of the weights
    assert float(jnp.max(jnp.abs(second.mlp.layers[0].weight))) > 100 * float(jnp.max(jnp.abs(decay)))


def one_step(config, change=lambda batch: batch):
    """The change of the members in one gradient step on rows that they already predict."""

    @jax.jit
    def step():
        world = jax.tree.map(lambda x: x[0], problem(1)[1])
        inputs, members = jr.normal(jr.key(3), (16, 5)), world.members
        first = jax.tree.map(lambda x: x[0], members)
        members = jax.tree.map(lambda x: jnp.stack([x, x]), first)
        examples = fits.Examples(inputs, first(inputs)[0])
        seeds = jnp.arange(32, dtype=jnp.uint32).reshape(2, 16)
        batch = change(fits.Minibatches(examples, jnp.ones((16, 2)), jnp.zeros((2, 16)), seeds))
        after, _ = fits._gradient_step(config, members, fits._optimizer(config).init(members), batch)
        return jax.tree.map(lambda a, b: a - b, after, members)

    return step()


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


LITTLE = changed(TINY, {"fit.batches_per_step": 1.0, "fit.learning_rate": 1e-2})
fit = eqx.filter_jit(fits.fit)


def test_rewards_of_terminating_steps_are_left_out_where_they_are_learnt_apart():
    replay, world = jax.tree.map(lambda x: x[0], problem(1))
    rows = eqx.tree_at(lambda r: r.terminated, replay.rows, jnp.zeros(200).at[7].set(1.0))
    learnt = eqx.tree_at(lambda w: w.end_rewards, world, unknown_end_rewards(), is_leaf=lambda x: x is None)
    assert fits.as_examples(TINY, world, rows).has_reward is None  # no episode can end
    has_reward = fits.as_examples(TINY, learnt, rows).has_reward
    assert has_reward is not None and np.flatnonzero(has_reward == 0).tolist() == [7]
    together = changed(TINY, {"terminator.rewards": False})
    assert fits.as_examples(together, learnt, rows).has_reward is None


def test_a_share_of_each_minibatch_comes_from_the_newest_fifth():
    config, evenly = (changed(LITTLE, {"fit.recent_share": share}) for share in (0.5, 0.0))
    replay, _ = jax.tree.map(lambda x: x[0], problem(1))
    uniform = jnp.array([[0.0, 0.999, 0.0, 0.999]])
    # 100 rows, the oldest first
    young = eqx.tree_at(lambda r: r.position, replay, jnp.asarray(100))
    assert fits._rows_by_age(config, budget(100), young, uniform).tolist() == [[99, 80, 99, 0]]
    assert fits._rows_by_age(evenly, budget(100), young, uniform).tolist() == [[99, 0, 99, 0]]
    # all 200, of which the last was written to position 9
    full = eqx.tree_at(lambda r: r.position, replay, jnp.asarray(10))
    assert fits._rows_by_age(config, budget(200), full, uniform).tolist() == [[9, 170, 9, 10]]


def compiled_anew():
    """The fit with what a test has put in place of its parts: another function, so it is not the program of `fit`."""
    return eqx.filter_jit(lambda *arguments: fits.fit(*arguments))


def test_a_little_fit_has_as_many_minibatches_as_planned(monkeypatch):
    def count(config, members, opt_state, batch):
        del config, batch
        return eqx.tree_at(lambda m: m.log_noise, members, members.log_noise + 1.0), opt_state

    monkeypatch.setattr(fits, "_gradient_step", count)
    replay, world = problem(2)
    fitted, metrics = compiled_anew()(LITTLE, budget(200, 3, epochs=7), replay, world, jr.split(jr.key(1), 2))
    np.testing.assert_allclose(fitted.members.log_noise - world.members.log_noise, 21.0, rtol=1e-6)
    assert metrics["model/epochs"].tolist() == [7, 7]


def test_each_epoch_has_rows_of_its_own(monkeypatch):
    def first_rows(config, budget, draw_examples, reward_noise, carry, key):
        del config, budget, reward_noise
        members, opt_state = carry
        total = members.log_noise + jnp.sum(draw_examples(key, (1, 4))[0].inputs)
        return eqx.tree_at(lambda m: m.log_noise, members, total), opt_state

    monkeypatch.setattr(fits, "train_epoch", first_rows)
    replay, world = problem(1)
    counted = compiled_anew()
    once, twice = (
        counted(LITTLE, budget(200, epochs=n), replay, world, jr.split(jr.key(1), 1))[0].members.log_noise
        for n in (1, 2)
    )
    second = np.asarray(twice - once)
    assert not np.allclose(second, once - world.members.log_noise)


def test_a_little_fit_learns_all_rows_and_its_error_is_of_rows_that_it_has_not_seen():
    replay, world = problem(2)
    keys = jr.split(jr.key(1), 2)
    fitted, before = fit(LITTLE, budget(200, 2, epochs=150), replay, world, keys)
    _, after = fit(LITTLE, budget(200, 2, epochs=0), replay, fitted, keys)
    assert np.all(after["model/validation_rmse"] < 0.25 * before["model/validation_rmse"])
    # of the newest 16 rows (a minibatch), by the members as they were
    one, rows = jax.tree.map(lambda x: x[1], (world, replay.rows))
    examples = jax.tree.map(lambda x: x[-16:], fits.as_examples(LITTLE, one, rows))
    each = np.stack([jax.tree.map(lambda x, k=k: x[k], one.members)(examples.inputs)[0] for k in range(2)])
    rmse = np.sqrt(np.mean((each.mean(0) - examples.target) ** 2))
    np.testing.assert_allclose(before["model/validation_rmse"][1], rmse, rtol=1e-4)
    np.testing.assert_allclose(
        before["model/member_rmse"][1], np.sqrt(np.mean((each - examples.target[None]) ** 2)), rtol=1e-4
    )


def test_the_first_fit_has_no_rows_that_come_after_it():
    replay, world = problem(1)
    first = eqx.tree_at(lambda b: b.num_new, budget(200, 1), jnp.asarray(200))
    _, metrics = fit(LITTLE, first, replay, world, jr.split(jr.key(1), 1))
    assert np.isnan(metrics["model/validation_rmse"]) and np.isnan(metrics["model/validation_score"])
    few = eqx.tree_at(lambda b: b.num_new, budget(200, 1), jnp.asarray(3))
    _, metrics = fit(LITTLE, few, replay, world, jr.split(jr.key(1), 1))
    one, rows = jax.tree.map(lambda x: x[0], (world, replay.rows))
    examples = jax.tree.map(lambda x: x[-3:], fits.as_examples(LITTLE, one, rows))
    each = np.stack([jax.tree.map(lambda x, k=k: x[k], one.members)(examples.inputs)[0] for k in range(2)])
    rmse = np.sqrt(np.mean((each.mean(0) - examples.target) ** 2))
    np.testing.assert_allclose(metrics["model/validation_rmse"][0], rmse, rtol=1e-4)


def test_each_seed_of_a_little_fit_fits_as_it_would_alone():
    replay, world = problem(3)
    keys = jr.split(jr.key(1), 3)
    together, _ = fit(LITTLE, budget(200, 2, epochs=3), replay, world, keys)
    alone, _ = fit(LITTLE, budget(200, 2, epochs=3), *jax.tree.map(lambda x: x[1:2], (replay, world)), keys[1:2])
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
        np.testing.assert_allclose(a[0], b[1], rtol=1e-4, atol=1e-5)
