"""Learnt termination: rare ends, odds that are put right, what rollouts make of it."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from doublehorizon.algorithm import replay_buffer as replays
from doublehorizon.algorithm import termination_model
from doublehorizon.algorithm.end_rewards import EndRewards, fit_end_rewards
from doublehorizon.algorithm.networks import TerminationClassifier
from doublehorizon.algorithm.normalizer import Normalizer, identity
from doublehorizon.algorithm.rollouts import distribution_rollout, draw_noise, no_perturbations, training_rollout
from doublehorizon.algorithm.termination_model import TerminationModel, fit_termination_model
from doublehorizon.algorithm.termination_model import untrained_termination_model as untrained
from doublehorizon.algorithm.types import Budget, Task, Transition
from doublehorizon.algorithm.world_model import WorldModel, imagine_end
from doublehorizon.config import TerminatorConfig
from worlds import ConstantActor, LineMlp, budget, line_world, random_actor

CONFIG = TerminatorConfig(members=2, width=32, learning_rate=3e-3, batches=600)
TASK = Task(1, 1, None, learns_termination=True)


def stored(obs: np.ndarray, terminated: np.ndarray) -> replays.ReplayBuffer:
    """Steps that stay where they are."""
    arrays = (obs, 0 * obs, obs[:, 0], obs, terminated)
    return filled(Transition(*(jnp.asarray(x, jnp.float32) for x in arrays)))


@eqx.filter_jit
def filled(rows: Transition) -> replays.ReplayBuffer:
    return replays.add(replays.empty(len(rows.reward), 1, 1, 2, 5), rows, jr.key(0))


def fitted(
    replay: replays.ReplayBuffer, batches: int = CONFIG.batches, holds_out: bool = True
) -> tuple[TerminationModel, dict]:
    return fit(budget(replay.rows.reward.shape[0], ends=batches), replay, holds_out)


@eqx.filter_jit
def fit(work: Budget, replay: replays.ReplayBuffer, holds_out: bool) -> tuple[TerminationModel, dict]:
    before = untrained(CONFIG, 1, 1, jr.key(1))
    ends = fit_end_rewards(replay.rows.reward, replay.rows.terminated > 0)
    return fit_termination_model(CONFIG, holds_out, work, before, identity(1), ends, replay, jr.key(2))


def probability(model: TerminationModel, obs: list[float]) -> np.ndarray:
    column = np.asarray(obs, np.float32)[:, None]
    return np.asarray(predict(model, column)[0])


@eqx.filter_jit
def predict(model: TerminationModel, column) -> tuple:
    return model.predict(identity(1), column, 0 * column, column)


def test_before_the_first_end_it_predicts_none():
    assert probability(untrained(CONFIG, 1, 1, jr.key(0)), [-9.0, 0.0, 9.0]).tolist() == [0.0, 0.0, 0.0]
    obs = np.random.default_rng(0).normal(size=(500, 1))
    model, calibration = fitted(stored(obs, np.zeros(500)))
    assert probability(model, [-9.0, 0.0, 9.0]).tolist() == [0.0, 0.0, 0.0]
    assert np.isnan(calibration["termination/recall"]) and np.isnan(calibration["termination/precision"])


def test_an_end_in_hundreds_is_learnt_and_its_odds_are_true():
    obs = np.random.default_rng(0).normal(size=(20_000, 1))
    ends = (obs[:, 0] > 2.5).astype(np.float32)  # one step in 160
    model, calibration = fitted(stored(obs, ends))
    assert probability(model, [1.5, 1.0, -3.0]).max() < 0.1
    assert probability(model, [3.5, 4.0]).min() > 0.9
    assert calibration["termination/precision"] > 0.8 and calibration["termination/recall"] > 0.8


def test_weights_of_an_input_that_says_nothing_shrink_to_zero():
    obs = np.random.default_rng(0).normal(size=(500, 1))
    model, _ = fitted(stored(obs, (obs[:, 0] > 1).astype(np.float32)))
    before = np.asarray(untrained(CONFIG, 1, 1, jr.key(1)).members.mlp.layers[0].weight[:, 1])
    after = np.asarray(model.members.mlp.layers[0].weight[:, 1])
    shrunk = np.sign(before) * np.maximum(np.abs(before) - 600 * 3e-3 * 0.1, 0.0)
    np.testing.assert_allclose(after, shrunk, atol=1e-4)  # 600 roundings
    assert np.any(after == 0.0) and np.any(after != 0.0)


def test_a_rare_chance_is_given_as_such():
    """Ends that nothing foretells: their probability is their share, however often the minibatches show them."""
    rng = np.random.default_rng(0)
    obs, ends = rng.normal(size=(20_000, 1)), rng.random(20_000) < 0.01
    model, _ = fitted(stored(obs, ends), batches=100)
    assert np.mean(probability(model, list(rng.normal(size=200)))) == pytest.approx(0.01, rel=0.5)


def test_where_every_step_ends_it_says_so():
    obs = np.random.default_rng(0).normal(size=(500, 1))
    model, calibration = fitted(stored(obs, np.ones(500)))
    assert probability(model, [-1.0, 0.0, 1.0]).min() > 0.9
    assert calibration["termination/recall"] == 1.0


class PastOne(TerminationClassifier):
    """Ends with the probability 0.25 past 1."""

    def __init__(self):
        self.mlp = LineMlp(jnp.zeros(()))

    def __call__(self, inputs):
        return jnp.where(inputs[:, -1:] > 1.0, jnp.log(1 / 3), -jnp.inf)


def uncertain_world():
    model = TerminationModel(jax.tree.map(lambda x: x[None], PastOne()), jnp.zeros(()))
    return eqx.tree_at(lambda w: w.termination_model, line_world(), model, is_leaf=lambda x: x is None)


def test_sampled_flags_and_weights_have_the_same_mean():
    world = uncertain_world()
    next_obs = jnp.tile(jnp.array([[0.5], [1.5]]), (2000, 1))
    before = (next_obs, 0 * next_obs)
    weights, _ = imagine_end(TASK, world, before, next_obs, next_obs[:, 0], None)
    np.testing.assert_allclose(weights[:2], [1.0, 0.75], rtol=1e-6)
    flags, _ = imagine_end(TASK, world, before, next_obs, next_obs[:, 0], jr.uniform(jr.key(0), (4000,)))
    assert set(np.unique(flags)) == {0.0, 1.0} and flags[::2].min() == 1.0
    assert float(jnp.mean(flags[1::2])) == pytest.approx(0.75, abs=0.04)


def test_distribution_rollouts_end_as_often_as_the_probability_says():
    # every step leads past 1, where one in four ends; those begin anew
    starts, noise = jnp.full((9, 400, 1), 2.0), draw_noise(TASK, 8, 400, jr.key(5))
    actor = ConstantActor(jnp.array(0.1))
    steps, _ = distribution_rollout(TASK, uncertain_world(), actor, starts, noise)
    assert set(np.unique(steps.terminated)) == {0.0, 1.0}
    assert float(jnp.mean(steps.terminated)) == pytest.approx(0.25, abs=0.03)
    ended = np.asarray(steps.terminated[:-1]) > 0
    np.testing.assert_array_equal(np.asarray(steps.obs[1:, :, 0])[ended], 2.0)
    assert np.all(np.asarray(steps.obs[1:, :, 0])[~ended] > 2.0)


class RightIsDangerous(TerminationClassifier):
    """The further to the right a step leads, the likelier it ends: the logit is twice the new position."""

    def __init__(self):
        self.mlp = LineMlp(jnp.zeros(()))

    def __call__(self, inputs):
        return 2.0 * inputs[:, -1:]


def test_what_is_learnt_of_ends_leads_away_from_them():
    model = TerminationModel(jax.tree.map(lambda x: x[None], RightIsDangerous()), jnp.zeros(()))
    world = eqx.tree_at(lambda w: w.termination_model, line_world(), model, is_leaf=lambda x: x is None)
    noise, start = draw_noise(TASK, 3, 8, jr.key(4)), jnp.zeros((8, 1))

    def roll(perturbations):
        return training_rollout(TASK, world, random_actor(1, 1), start, noise, perturbations)

    gradient = jax.grad(lambda x: jnp.sum(roll(x).alive))(no_perturbations(TASK, noise))
    assert np.all(gradient[:-1, :, 0] < 0)  # a larger action leads to the right: less survives, in every step
    assert np.all(gradient[-1] == 0)  # nothing comes after the last one
    # by hand: what survives is the product of 1 - sigmoid(2 x) over the positions so far
    rollout = roll(no_perturbations(TASK, noise))
    survives = np.cumprod(1 - 1 / (1 + np.exp(-2 * np.asarray(rollout.obs[1:, :, 0]))), axis=0)
    np.testing.assert_allclose(rollout.alive[1:], survives, rtol=1e-4)
    np.testing.assert_array_equal(rollout.alive[0], 1)


def test_frequent_ends_have_their_true_odds_too():
    """Ends that nothing foretells, in half of all steps."""
    rng = np.random.default_rng(0)
    obs, ends = rng.normal(size=(20_000, 1)), rng.random(20_000) < 0.5
    model, _ = fitted(stored(obs, ends), batches=100)
    assert np.mean(probability(model, list(rng.normal(size=200)))) == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize(("checked", "precision", "recall"), [(100, 1 / 3, 1 / 2), (2, 1 / 2, 1.0)])
def test_precision_and_recall_by_hand(monkeypatch, checked, precision, recall):
    """Five groups, from one of which one row is held out each: an end that is missed, a false alarm, a quiet step, a
    false alarm, and an end that is foreseen. The last two are the newest."""
    monkeypatch.setattr(termination_model, "_CHECKED_ROWS", checked)
    danger = np.repeat([-1.0, 1.0, -1.0, 1.0, 1.0], 5)[:, None]
    ended = np.repeat([1.0, 0.0, 0.0, 0.0, 1.0], 5)
    model = TerminationModel(jax.tree.map(lambda x: x[None], RightIsDangerous()), jnp.zeros(()))
    rows = termination_model._newest_held_out(stored(danger, ended), budget(25))
    found = termination_model._precision_and_recall(model, identity(1), *rows)
    assert float(found["termination/precision"]) == pytest.approx(precision)
    assert float(found["termination/recall"]) == pytest.approx(recall)


def test_the_only_end_there_is_is_learnt_unless_it_is_held_out():
    obs = np.linspace(-1.0, 1.0, 500)[:, None]
    replay = stored(obs, np.zeros(500))
    row = int(replays.validation_rows(replay, jnp.array([99]))[0])  # in the last group, the one that is held out
    replay = eqx.tree_at(lambda r: r.rows.terminated, replay, replay.rows.terminated.at[row].set(1.0))
    there = [float(obs[row, 0])]
    assert probability(fitted(replay)[0], there)[0] == 0.0
    assert probability(fitted(replay, holds_out=False)[0], there)[0] > 0.02  # one in 500, were it the same everywhere


def test_where_no_rows_are_held_out_it_is_judged_by_those_that_came_since():
    """Thirty rows, of which the last 20 are new: an end that is foreseen, a false alarm, an end that is missed."""
    danger, ended = -np.ones((30, 1)), np.zeros(30)
    danger[[3, 12, 15]], ended[[5, 12, 20]] = 1.0, 1.0
    model = TerminationModel(jax.tree.map(lambda x: x[None], RightIsDangerous()), jnp.zeros(()))
    replay = stored(danger, ended)
    found = termination_model._precision_and_recall(model, identity(1), *termination_model._newest(replay, budget(30)))
    assert float(found["termination/precision"]) == 0.5 and float(found["termination/recall"]) == 0.5
    first = termination_model._precision_and_recall(model, identity(1), *termination_model._newest(replay, budget(20)))
    assert np.isnan(first["termination/precision"]) and np.isnan(first["termination/recall"])
    # what a fit says is how good the model was before it: nothing was foreseen, though all is learnt now
    obs = np.tile([[-2.0], [2.0]], (250, 1))
    model, calibration = fitted(stored(obs, obs[:, 0] > 0), holds_out=False)
    assert float(calibration["termination/recall"]) == 0.0 and probability(model, [2.0])[0] > 0.9


# -- what an end brings ------------------------------------------------------------------------------------


class PastOneWithReward(PastOne):
    """And then brings twice the position, in units of the endings' own."""

    def __call__(self, inputs):
        return jnp.concatenate([super().__call__(inputs), 2.0 * inputs[:, -1:]], axis=-1)


def world_with_fines() -> WorldModel:
    model = TerminationModel(jax.tree.map(lambda x: x[None], PastOneWithReward()), jnp.zeros(()))
    ends = EndRewards(
        jnp.array(-200.0), jnp.array(-90.0), Normalizer(jnp.array([-100.0]), jnp.array([10.0])), jnp.array(True)
    )
    return dataclasses.replace(line_world(), termination_model=model, end_rewards=ends)


def test_the_reward_of_a_step_is_that_of_going_on_or_that_of_its_end():
    world, next_obs = world_with_fines(), jnp.array([[0.5], [1.5], [-9.0], [1.2]])
    step = (TASK, world, (next_obs, 0 * next_obs), next_obs, jnp.array([7.0, 8.0, 9.0, 8.0]))
    # an end past 1.5 brings -100 + 10 * 3 = -70, of which no more than -90 was ever seen
    goes_on, reward = imagine_end(*step, None)
    np.testing.assert_allclose(goes_on, [1.0, 0.75, 1.0, 0.75], rtol=1e-6)
    np.testing.assert_allclose(reward, [7.0, 0.75 * 8.0 - 0.25 * 90.0, 9.0, 0.75 * 8.0 - 0.25 * 90.0], rtol=1e-6)
    goes_on, reward = imagine_end(*step, jnp.array([0.1, 0.1, 0.1, 0.9]))
    assert goes_on.tolist() == [1.0, 0.0, 1.0, 1.0]
    np.testing.assert_allclose(reward, [7.0, -90.0, 9.0, 8.0], rtol=1e-6)
    # a reward that is known counts for ends too
    known = dataclasses.replace(TASK, reward=lambda obs, act, next_obs: next_obs[..., 0])
    assert imagine_end(known, *step[1:], None)[1].tolist() == [7.0, 8.0, 9.0, 8.0]


def test_a_rollout_knows_both_rewards():
    noise, start = draw_noise(TASK, 1, 8, jr.key(0)), jnp.full((8, 1), 1.5)
    rollout = training_rollout(
        TASK, world_with_fines(), ConstantActor(jnp.array(0.25)), start, noise, no_perturbations(TASK, noise)
    )
    np.testing.assert_allclose(rollout.going_reward, 1.75, rtol=1e-4)
    np.testing.assert_allclose(rollout.reward, 0.75 * 1.75 - 0.25 * 90.0, rtol=1e-4)


def test_what_ends_bring_is_learnt_where_they_happen():
    """Left ends with a fine, right with a prize; in between nothing is to be learnt of ends."""
    obs = np.random.default_rng(0).normal(size=(20_000, 1))
    ends = (np.abs(obs[:, 0]) > 2.0).astype(np.float32)
    replay = stored(obs, ends)
    reward = jnp.where(ends > 0, jnp.where(obs[:, 0] > 0, 300.0, -5000.0), 17.0)
    replay = eqx.tree_at(lambda r: r.rows.reward, replay, reward)
    known = fit_end_rewards(reward, jnp.asarray(ends) > 0)
    assert (float(known.low), float(known.high)) == (-5000.0, 300.0) and bool(known.seen)
    model, _ = fitted(replay)
    column = jnp.array([[-3.0], [-2.2], [2.2], [3.0]])
    _, raw = model.predict(identity(1), column, 0 * column, column)
    np.testing.assert_allclose(known.denormalize(raw), [-5000, -5000, 300, 300], atol=300)


def test_nothing_is_known_of_ends_before_the_first():
    known = fit_end_rewards(jnp.array([4.0, -5.0]), jnp.array([False, False]))
    assert not bool(known.seen) and float(known.low) == float(known.high) == 0.0
    assert float(known.denormalize(jnp.array([3.0]))[0]) == 0.0


def test_only_endings_tell_what_endings_bring():
    known = fit_end_rewards(jnp.array([4.0, -5.0, 2.0, 9.0]), jnp.array([True, False, True, False]))
    assert (float(known.low), float(known.high)) == (2.0, 4.0)
    assert (float(known.normalizer.mean[0]), float(known.normalizer.std[0])) == (3.0, 1.0)
