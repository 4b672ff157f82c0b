"""A seed that diverges goes back and tries again; the others do not notice."""

import re

import equinox as eqx
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doublehorizon as dh
from doublehorizon.algorithm.agent import AgentState
from doublehorizon.algorithm.divergence import signs_of_divergence
from doublehorizon.errors import RunError
from doublehorizon.run.progress import Progress
from doublehorizon.training import learning_phase
from worlds import TINY


def poisoned(state: AgentState, seed: int, value: float) -> AgentState:
    weight = state.actor_critic.actor.mlp.layers[0].weight
    return eqx.tree_at(lambda s: s.actor_critic.actor.mlp.layers[0].weight, state, weight.at[seed].set(value))


def train_with_poison(monkeypatch, attempts: set[int], value: float = np.nan, out=None) -> dh.DHMBPO:
    """Two seeds; the given attempts at learning, counted from 0, end with a value in seed 1's actor."""
    model = dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY)
    attempt, count = learning_phase._attempt, iter(range(100))

    def hurt(*arguments):
        state, metrics = attempt(*arguments)
        return (poisoned(state, 1, value) if next(count) in attempts else state), metrics

    with monkeypatch.context() as patch:
        patch.setattr(learning_phase, "_attempt", hurt)
        return model.learn(80, out=out)


def arrays(model: dh.DHMBPO) -> list[np.ndarray]:
    progress = model._progress
    assert isinstance(progress, Progress)
    return [np.asarray(x) for x in jax.tree.leaves(eqx.filter((progress.agent, progress.replay), eqx.is_inexact_array))]


@pytest.mark.parametrize("value", [np.nan, pytest.param(1e9, marks=pytest.mark.slow)])
def test_a_poisoned_seed_rolls_back_and_the_others_are_bit_identical(monkeypatch, said, value):
    clean = train_with_poison(monkeypatch, set())
    assert said == []
    hurt = train_with_poison(monkeypatch, {1, 2}, value)
    assert re.match(r"diverged at step 60: seed 1 \(the largest parameter is (nan|1e\+09)", said[0]), said
    others = np.array([0])
    for a, b in zip(arrays(clean), arrays(hurt), strict=True):
        np.testing.assert_array_equal(a[others], b[others])
        assert np.isfinite(b).all()
    assert not np.array_equal(clean.policies[1].weights[0], hurt.policies[1].weights[0])  # by other random numbers
    for seed in others:
        assert clean._progress.returns[80][seed] == hurt._progress.returns[80][seed]  # type: ignore[union-attr]


@pytest.mark.slow
def test_repeats_are_logged(monkeypatch, said, run_folder):
    train_with_poison(monkeypatch, {0, 1, 3}, np.inf, run_folder)
    assert [line[: line.index(":")] for line in said] == ["diverged at step 40"] * 2 + ["diverged at step 60"]
    header, *rows = [line.split(",") for line in (run_folder / "progress.csv").read_text().splitlines()]
    repeats = {(int(row[0]), int(row[header.index("seed")])): int(row[header.index("train/repeats")]) for row in rows}
    assert repeats == {(40, 0): 0, (60, 0): 0, (80, 0): 0, (40, 1): 2, (60, 1): 1, (80, 1): 0}


@pytest.mark.slow
def test_a_seed_that_keeps_diverging_ends_the_run_where_all_were_healthy(monkeypatch, said, run_folder):
    again = r"diverged at step 80 and again in 3 repeats: seed 1 \(the largest parameter"
    with pytest.raises(RunError, match=again):
        train_with_poison(monkeypatch, {2, 3, 4, 5}, out=run_folder)
    assert len(said) == 3
    saved = dh.DHMBPO.load(run_folder)
    assert saved.num_timesteps == 60 and np.isfinite(saved.policies[1].weights[0]).all()
    saved.learn(20)
    clean = train_with_poison(monkeypatch, set())
    for a, b in zip(arrays(clean), arrays(saved), strict=True):
        np.testing.assert_array_equal(a, b)  # as if nothing had happened


def test_what_explodes_without_being_infinite_is_noticed():
    progress = dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY).learn(80)._progress
    assert progress is not None
    state, replay = progress.agent, progress.replay

    def evidence(state: AgentState, metrics=None) -> list[str]:
        return signs_of_divergence(0.995, progress.num_rows, replay, state, metrics or {})

    assert evidence(state) == ["", ""]
    far = eqx.tree_at(lambda s: s.model_buffer.rows.obs, state, state.model_buffer.rows.obs.at[1, 0].set(1e7))
    assert evidence(far)[0] == "" and "imagined observations are up to" in evidence(far)[1]
    rich = eqx.tree_at(lambda s: s.actor_critic.bounds.high, state, jnp.array([1e9, 0.0]))
    assert "imagined rewards" in evidence(rich)[0] and evidence(rich)[1] == ""
    loss = {"train/critic_loss": np.array([1.0, np.inf]), "termination/recall": np.full(2, np.nan)}
    assert evidence(state, loss) == ["", "train/critic_loss is inf"]


class Glitch(gym.Wrapper):
    """A sensor that fails for one step of each episode: one number is 1e30."""

    def reset(self, **kwargs):
        self.count = 0
        return self.env.reset(**kwargs)

    def step(self, action):
        self.count += 1
        obs, *rest = self.env.step(action)
        return np.where(self.count == 7, np.array([1.0, 1e30, 1.0], np.float32), obs), *rest


def test_a_retry_leaves_the_row_out_that_a_seed_diverged_on(said, tmp_path):
    def make():
        return Glitch(gym.make("Pendulum-v1"))

    model = dh.DHMBPO(make, config=TINY, check=False).learn(80, out=tmp_path / "whole")
    assert "diverged at step 40" in said[0] and len(said) == 2
    assert said[1] == (
        "seed 0 no longer trains on 2 transitions: o1 after the step is an extreme outlier, over 1000 times the usual "
        "deviation (row 6 of the replay)"
    )
    rows = model.progress.replay.rows
    assert np.abs(rows.obs[0, :80]).max() < 10.0 and np.abs(rows.next_obs[0, :80]).max() < 10.0
    for at, copy_of in ((6, 8), (7, 8)):
        np.testing.assert_array_equal(rows.obs[0, at], rows.obs[0, copy_of])
    assert [tuple(entry) for entry in model.progress.state.left_out] == [(0, 6, 8), (0, 7, 8)]
    # a run that is resumed leaves the same rows out
    stopped = dh.DHMBPO(make, config=TINY, check=False).learn(60, out=tmp_path / "run")
    assert np.abs(dh.DHMBPO.load(tmp_path / "run", env=make).progress.replay.rows.obs[0, :60]).max() < 10.0
    again = dh.DHMBPO.load(tmp_path / "run", env=make).learn(20)
    for a, b in zip(arrays(again), arrays(stopped.learn(20)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_that_were_left_out_come_back_where_a_run_goes_back(said):
    def make():
        return Glitch(gym.make("Pendulum-v1"))

    model = dh.DHMBPO(make, config=TINY, check=False)

    def interrupt(progress):
        if progress.step == 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.learn(80, callback=interrupt)
    assert model.progress.state.left_out == () and model.num_timesteps == 20
    assert model.progress.replay.rows.obs[0, 7, 1] == np.float32(1e30)
