"""Runs on named observations: their order in files, tests and clients."""

import json
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box

import doublehorizon as dh
from doublehorizon.envs.make import describe
from doublehorizon.envs.spaces import layout
from doublehorizon.errors import UserError
from doublehorizon.run.checkpoint_reader import read_newest, restore
from doublehorizon.run.run_reader import read_run
from observation_spaces import LIMITED, SPACES, TANKS, batched, random_policy, samples
from worlds import TINY


class Tanks(gym.Env):
    """As `examples/two_tanks.py`, without its physics: the reward is for closeness to what is wanted."""

    observation_space, action_space = TANKS, Box(0.0, 10.0, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.levels, self.wanted, self.steps = self.np_random.uniform(0, 1, 2), self.np_random.uniform(0, 1, 1), 0
        return self._observe(), {}

    def step(self, action):
        assert action.shape == (1,)
        self.levels = np.clip(self.levels + 0.02 * (action[0] - 5.0), 0, 2)
        self.steps += 1
        reward = -float(np.square(self.levels - self.wanted).sum())
        return self._observe(), reward, False, self.steps >= 10, {}

    def _observe(self):
        return {"levels": self.levels.astype(np.float32), "wanted": self.wanted.astype(np.float32)}


class TurnedTanks(Tanks):
    """The same numbers in another order."""

    observation_space = SPACES["unsorted"]


def test_what_is_known_of_an_environment_says_how_it_is_laid_out():
    spec = describe(Tanks(), TINY)
    assert spec.layout == layout(TANKS, Tanks.action_space)
    assert json.loads(json.dumps(spec.facts()))["layout"] == spec.layout.to_json()
    plain = describe(gym.make("Pendulum-v1"))
    assert plain.layout is None and plain.facts()["layout"] is None


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[dh.DHMBPO, Path]:
    folder = tmp_path_factory.mktemp("tanks") / "run"
    return dh.DHMBPO(Tanks, config=LIMITED).learn(40, out=folder), folder


def test_a_run_on_named_observations_is_used_by_their_names(trained):
    model, folder = trained
    seen = samples(TANKS)
    action, _ = dh.load_policy(folder).predict(seen[0])
    assert Tanks.action_space.contains(action)
    np.testing.assert_array_equal(model.predict(seen[0])[0], action)
    turned = {"wanted": seen[0]["wanted"], "levels": seen[0]["levels"]}
    np.testing.assert_array_equal(model.predict(turned)[0], action)
    many = batched(TANKS, seen)
    assert model.predict(many)[0].shape == (5, 1)
    np.testing.assert_array_equal(dh.load_policy(folder).predict(many)[0], model.predict(many)[0])
    for agent in (model, dh.load_policy(folder)):
        with pytest.raises(UserError, match=r"needs a dict: levels \(2\), wanted \(1\)"):
            agent.predict(np.zeros(3, np.float32))


def test_a_run_goes_on_with_its_entries_in_the_same_order(trained):
    model, folder = trained
    again = dh.DHMBPO.load(folder, env=Tanks)
    assert again.policies[0].layout == model.policies[0].layout
    with pytest.raises(UserError, match="was trained with layout"):
        dh.DHMBPO.load(folder, env=TurnedTanks)
    saved, turned = read_newest(folder)[0], describe(TurnedTanks(), LIMITED)
    before = replace(saved, env={name: fact for name, fact in saved.env.items() if name != "layout"})
    assert restore(before, turned)[0].policies[0].layout == turned.layout  # a run from before goes on


def test_a_run_is_tested_with_its_entries_in_the_same_order(trained):
    model, folder = trained
    found = read_run(folder)
    assert found.env["layout"] == model.spec.layout.to_json()
    found.simulator("test_named_runs:Tanks")
    with pytest.raises(UserError, match="was trained with layout"):
        found.simulator("test_named_runs:TurnedTanks")
    del found.env["layout"]  # as in a run from before
    found.simulator("test_named_runs:TurnedTanks")


class Spoken(Tanks):
    """It also says a word, which only Gymnasium can lay out."""

    observation_space = spaces.Dict(word=spaces.Text(2), **TANKS.spaces)
    action_space = Box(0.0, 10.0, (1, 1))

    def step(self, action):
        return super().step(action[0])

    def _observe(self):
        return super()._observe() | {"word": "ab"}


def test_an_agent_predicts_for_what_only_gymnasium_can_lay_out(monkeypatch):
    env, policy = Spoken(), random_policy(Spoken.observation_space, Spoken.action_space)
    obs, _ = env.reset(seed=0)
    monkeypatch.setattr(dh.DHMBPO, "_best", lambda self: policy)
    action, _ = dh.DHMBPO(Spoken, config=LIMITED).predict(obs)
    flat = np.asarray(spaces.flatten(Spoken.observation_space, obs), np.float32)
    assert policy.layout is None and action.shape == (1, 1)
    np.testing.assert_array_equal(action[0], policy.predict(flat)[0])


@pytest.mark.slow
def test_stable_baselines3_evaluates_on_named_observations(trained):
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import DummyVecEnv

    def episode(agent, seed: int) -> float:
        env, total, over = Tanks(), 0.0, False
        obs, _ = env.reset(seed=seed)
        while not over:
            obs, reward, _, over, _ = env.step(agent.predict(obs)[0])
            total += reward
        return total

    model, folder = trained
    for agent in (model, dh.load_policy(folder)):
        env = DummyVecEnv([Tanks] * 3)
        env.seed(5)
        returns, lengths = evaluate_policy(agent, env, n_eval_episodes=3, return_episode_rewards=True, warn=False)
        assert lengths == [10] * 3
        np.testing.assert_allclose(sorted(returns), sorted(episode(agent, seed) for seed in (5, 6, 7)), rtol=1e-4)
