"""Learnt termination: rare ends, odds that are put right, what rollouts make of it."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from doublehorizon import agent
from doublehorizon import replay as replays
from doublehorizon.config import TerminatorConfig
from doublehorizon.dynamics import survives
from doublehorizon.networks import Classifier
from doublehorizon.normalizer import identity
from doublehorizon.rollouts import draw_noise, no_nudges, training_rollout
from doublehorizon.terminator import Terminator, fit_terminator, untrained
from doublehorizon.types import Task, Transition
from worlds import LineMlp, line_world, random_actor

CONFIG = TerminatorConfig(members=2, width=32, learning_rate=3e-3, batches=600)
TASK = Task(1, 1, None, learns_termination=True)


def stored(obs: np.ndarray, terminated: np.ndarray) -> replays.Replay:
    """Steps that stay where they are."""
    rows = Transition(*(jnp.asarray(x, jnp.float32) for x in (obs, 0 * obs, obs[:, 0], obs, terminated)))
    return replays.add(replays.empty(len(obs), 1, 1, 2, 5), rows, jr.key(0))


def fitted(replay: replays.Replay, config: TerminatorConfig = CONFIG) -> tuple[Terminator, dict]:
    plan = agent.Plan(replay.rows.reward.shape[0], 1, 1, 1, config.batches, 1)
    before = untrained(config, 1, 1, jr.key(1))
    fit = eqx.filter_jit(lambda *inputs: fit_terminator(config, plan.effort(), *inputs))
    return fit(before, identity(1), replay, jr.key(2))


def probability(terminator: Terminator, obs: list[float]) -> np.ndarray:
    column = jnp.asarray(obs, jnp.float32)[:, None]
    return np.asarray(terminator.probability(identity(1), column, 0 * column, column))


def test_before_the_first_end_it_predicts_none():
    assert probability(untrained(CONFIG, 1, 1, jr.key(0)), [-9.0, 0.0, 9.0]).tolist() == [0.0, 0.0, 0.0]
    obs = np.random.default_rng(0).normal(size=(500, 1))
    terminator, calibration = fitted(stored(obs, np.zeros(500)))
    assert probability(terminator, [-9.0, 0.0, 9.0]).tolist() == [0.0, 0.0, 0.0]
    assert np.isnan(calibration["termination/recall"]) and np.isnan(calibration["termination/precision"])


def test_an_end_in_hundreds_is_learnt_and_its_odds_are_true():
    obs = np.random.default_rng(0).normal(size=(20_000, 1))
    ends = (obs[:, 0] > 2.5).astype(np.float32)  # one step in 160
    terminator, calibration = fitted(stored(obs, ends))
    assert probability(terminator, [1.5, 1.0, -3.0]).max() < 0.1
    assert probability(terminator, [3.5, 4.0]).min() > 0.9
    assert calibration["termination/precision"] > 0.8 and calibration["termination/recall"] > 0.8


def test_a_rare_chance_is_given_as_such():
    """Ends that nothing foretells: their probability is their share, however often the minibatches show them."""
    rng = np.random.default_rng(0)
    obs, ends = rng.normal(size=(20_000, 1)), rng.random(20_000) < 0.01
    terminator, _ = fitted(stored(obs, ends), dataclasses.replace(CONFIG, batches=100))
    assert np.mean(probability(terminator, list(rng.normal(size=200)))) == pytest.approx(0.01, rel=0.5)


def test_where_every_step_ends_it_says_so():
    obs = np.random.default_rng(0).normal(size=(500, 1))
    terminator, calibration = fitted(stored(obs, np.ones(500)))
    assert probability(terminator, [-1.0, 0.0, 1.0]).min() > 0.9
    assert calibration["termination/recall"] == 1.0


class PastOne(Classifier):
    """Ends with the probability 0.25 past 1."""

    def __init__(self):
        self.mlp = LineMlp(jnp.zeros(()))

    def __call__(self, inputs):
        return jnp.where(inputs[:, -1] > 1.0, jnp.log(1 / 3), -jnp.inf)


def uncertain_world():
    terminator = Terminator(jax.tree.map(lambda x: x[None], PastOne()), jnp.zeros(()))
    return eqx.tree_at(lambda w: w.terminator, line_world(), terminator, is_leaf=lambda x: x is None)


def test_sampled_flags_and_weights_have_the_same_mean():
    world = uncertain_world()
    next_obs = jnp.tile(jnp.array([[0.5], [1.5]]), (2000, 1))
    before = (next_obs, 0 * next_obs)
    weights = survives(TASK, world, before, next_obs, None)
    np.testing.assert_allclose(weights[:2], [1.0, 0.75], rtol=1e-6)
    flags = survives(TASK, world, before, next_obs, jr.uniform(jr.key(0), (4000,)))
    assert set(np.unique(flags)) == {0.0, 1.0} and flags[::2].min() == 1.0
    assert float(jnp.mean(flags[1::2])) == pytest.approx(0.75, abs=0.04)


def test_what_is_learnt_of_ends_leads_away_from_them():
    task = Task(1, 1, None, learns_termination=True)
    terminator = untrained(CONFIG, 1, 1, jr.key(3))
    terminator = eqx.tree_at(lambda t: t.log_odds, terminator, jnp.zeros(()))
    world = eqx.tree_at(lambda w: w.terminator, line_world(), terminator, is_leaf=lambda x: x is None)
    noise, start = draw_noise(task, 3, 8, jr.key(4)), jnp.zeros((8, 1))

    def alive(nudges):
        return jnp.sum(training_rollout(task, world, random_actor(1, 1), start, noise, nudges).alive)

    value, slope = jax.value_and_grad(alive)(no_nudges(task, noise))
    assert 8 < float(value) < 32
    assert bool(jnp.any(slope != 0))
