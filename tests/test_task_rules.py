"""Numbers that follow from what a task is: how long its episodes last, and whether they can end."""

import gymnasium as gym
import jax.random as jr
import numpy as np
import pytest

import doublehorizon as dh
from doublehorizon import presets
from doublehorizon.acting.env_runner import EnvRunner
from doublehorizon.algorithm.types import Task
from doublehorizon.algorithm.updates import UpdateContext, target_indices
from doublehorizon.config import Config
from doublehorizon.config_json import from_run, to_json
from doublehorizon.envs.make import Simulator, describe
from doublehorizon.schedule import discount, rollout_noise, target_members
from worlds import TINY, line_world

FREE = TINY.with_(policy__discount=None)


@pytest.mark.parametrize(
    ("steps", "counted"), [(1, 20), (50, 20), (100, 40), (200, 80), (500, 200), (1000, 200), (None, 200)]
)
def test_the_discount_counts_two_fifths_of_an_episode(steps, counted):
    assert discount(Config(), steps) == pytest.approx(1 - 1 / counted, abs=1e-12)
    assert discount(Config().with_(policy__discount=0.9), steps) == 0.9
    assert discount(presets.paper, steps) == 0.995


def test_where_nothing_ends_there_is_no_noise_and_one_critic_is_the_target():
    assert (rollout_noise(Config(), True), rollout_noise(Config(), False)) == (1.0, 0.0)
    assert (target_members(Config(), True), target_members(Config(), False)) == (2, 1)
    for can_end in (True, False):
        assert rollout_noise(presets.paper, can_end) == 1.0 and target_members(presets.paper, can_end) == 2
        given = Config().with_(model__rollout_noise=0.5, critic__target_members=3)
        assert rollout_noise(given, can_end) == 0.5 and target_members(given, can_end) == 3
    assert target_members(Config().with_(critic__members=1), True) == 1


@pytest.mark.parametrize(("task", "chosen"), [(Task(1, 1, None), 1), (Task(1, 1, None, learns_termination=True), 2)])
def test_an_update_follows_the_rules(task, chosen):
    context = UpdateContext(Config(), task, line_world())
    found = np.asarray([target_indices(context, jr.key(k)) for k in range(40)])
    assert found.shape == (40, chosen) and set(found.ravel()) == {0, 1, 2, 3, 4}
    assert context.rollout_noise == float(task.can_end)


def test_runs_of_before_keep_their_numbers():
    old = to_json(Config())
    old["model"].pop("rollout_noise")
    old["critic"]["target_members"], old["policy"]["discount"], old["policy"]["updates_per_step"] = 2, 0.995, 1.0
    config = from_run(old)
    assert rollout_noise(config, False) == 1.0 and target_members(config, False) == 2
    assert discount(config, 100) == 0.995 and config.policy.updates_per_step == 1.0


class Cutting(gym.Env):
    """Walks along a line, and cuts its episodes off by itself; beyond 3 they end."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, after: int = 25):
        self.after = after

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.steps = 0.0, 0
        return np.array([self.at], np.float32), {}

    def step(self, action):
        self.at, self.steps = self.at + 0.3 * float(action[0]), self.steps + 1
        return np.array([self.at], np.float32), -abs(self.at), abs(self.at) > 3.0, self.steps >= self.after, {}


def test_the_longest_episode_that_was_cut_off_is_noted_and_none_that_ended():
    def longest(act: float, after: int) -> int:
        env = Cutting(after)
        runner = EnvRunner(Simulator(env, describe(env)), seed=0, seed_policy=lambda obs: np.array([act]))
        return runner.collect(0, None, 60).longest_cut

    assert longest(0.0, 25) == 25  # two whole episodes, and one that goes on
    assert longest(0.0, 70) == 0
    assert longest(1.0, 25) == 0  # ends in its 11th step: 3.3
    assert longest(1.0, 11) == 0  # ends and is cut in the same step: it has ended


def test_a_value_looks_no_further_than_episodes_that_the_environment_cuts_off(tmp_path, capsys, only_collecting):
    """Seen in the first steps, before anything is learnt; kept in the checkpoint."""
    model = dh.DHMBPO(lambda: Cutting(12), config=FREE)
    assert model.spec.time_limit == 1000
    model.learn(20, out=tmp_path / "run", progress_bar=True)
    progress = model.progress
    assert progress.state.cut_after == 12 == progress.task.episode_steps
    assert discount(progress.config, progress.task.episode_steps) == 0.95
    assert "episodes last up to 12 steps; the discount is 0.95" in capsys.readouterr().err
    again = dh.DHMBPO.load(tmp_path / "run", env=Cutting)
    assert again.progress.task == progress.task


class CutAtRandom(Cutting):
    """Its episodes are truncated after 12, 376 and 900 steps; the fourth goes on."""

    def __init__(self):
        super().__init__()
        self.lengths = iter([12, 376, 900, 2000])

    def reset(self, *, seed=None, options=None):
        self.after = next(self.lengths)
        return super().reset(seed=seed)

    def step(self, action):
        return super().step(0.0 * action)


def test_a_short_first_episode_does_not_decide_the_discount(only_collecting):
    config = FREE.with_(loop__seed_iterations=100, loop__time_limit=5000, loop__evaluation_episodes=0)
    seen = {}

    def note(progress):
        seen[progress.step] = discount(progress.config, progress.task.episode_steps)

    model = dh.DHMBPO(lambda: CutAtRandom(), config=config, check=False)
    model.learn(1400, callback=note)
    assert model.progress.state.cut_after == 900
    assert seen[20] == 0.95  # 12 steps, and 8 of the next episode
    assert seen[120] == pytest.approx(1 - 1 / (0.4 * 108))  # an episode that is running lasts longer
    assert seen[1400] == 0.995


def test_what_the_time_limit_says_is_not_news(capsys, only_collecting):
    model = dh.DHMBPO(lambda: gym.wrappers.TimeLimit(Cutting(1000), 12), config=FREE)
    model.learn(20, progress_bar=True)
    assert model.progress.state.cut_after is None and model.progress.task.episode_steps == 12
    assert "cut off after" not in capsys.readouterr().err
