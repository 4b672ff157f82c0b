"""DeepMind's control suite: names, observations, time, chance."""

import os

import numpy as np
import pytest

from doublehorizon.acting.env_runner import EnvRunner
from doublehorizon.config import Config, LoopConfig
from doublehorizon.envs import dmc
from doublehorizon.envs.make import Simulator, describe, make
from doublehorizon.envs.termination import never
from doublehorizon.errors import UserError

pytest.importorskip("dm_control")

# Sizes and the mean of the published evaluations at step 0 over 8 seeds (random actions), with their spread
PUBLISHED = {
    "cheetah-run": (17, 6, 7.0, 1.0),
    "cartpole-balance": (5, 1, 319.0, 11.0),
    "walker-walk": (24, 6, 41.0, 2.0),
    "reacher-hard": (6, 2, 14.0, 11.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_random_returns_are_the_published_ones(name):
    obs_size, act_size, mean, spread = PUBLISHED[name]
    env = make(f"dmc/{name}")
    spec = describe(env)
    assert (spec.obs_size, spec.act_size, spec.time_limit, spec.action_repeat) == (obs_size, act_size, 500, 2)
    assert spec.terminates is never and spec.rule is None
    found = EnvRunner(Simulator(env, spec), seed=0).evaluate(0, None, num_episodes=10)
    assert abs(found - mean) < 3.5 * spread


def test_finding_a_task_leaves_drawing_to_others(monkeypatch):
    for variable in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(variable, raising=False)
    assert dmc.find_task("dmc/cartpole-balance") == ("cartpole", "balance")
    assert "MUJOCO_GL" not in os.environ


def test_a_task_has_several_names():
    for name in ("dmc/ball_in_cup-catch", "cup-catch", "ball_in_cup-catch", "dm_control/ball_in_cup-catch-v0"):
        assert dmc.find_task(name) == ("ball_in_cup", "catch")
    assert dmc.find_task("Hopper-v5") is None and dmc.find_task("nothing-here") is None
    with pytest.raises(UserError, match="dmc/cheetah-run"):
        make("dmc/cheeta-run")
    with pytest.raises(UserError, match="dmc/walker-walk"):
        make("walker-wlak")


def test_resets_are_seeded_and_the_limit_can_be_set():
    env = make("dmc/cheetah-run", LoopConfig(time_limit=3, action_repeat=4))
    first, again, other = (env.reset(seed=seed)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    simulator = Simulator(env, describe(env, Config(loop=LoopConfig(time_limit=3, action_repeat=4))))
    simulator.reset(seed=0)
    assert [simulator.step(np.zeros(6))[3] for _ in range(3)] == [False, False, True]


def test_the_regulator_ends_at_rest():
    env = make("dmc/lqr-lqr_2_1")
    rule = describe(env).rule
    assert rule is not None
    assert rule(np.array([[0.0] * 4, [1e-3, 0, 0, 0]])).tolist() == [True, False]


def test_every_task_of_the_paper_can_be_made():
    by_domain = {
        "acrobot": ["swingup", "swingup_sparse"],
        "cartpole": ["balance", "swingup", "swingup_sparse"],
        "cheetah": ["run"],
        "cup": ["catch"],
        "finger": ["spin", "turn_easy", "turn_hard"],
        "hopper": ["hop", "stand"],
        "humanoid": ["stand"],
        "quadruped": ["run"],
        "reacher": ["hard"],
        "walker": ["run", "stand", "walk"],
    }
    tasks = [f"{domain}-{task}" for domain, some in by_domain.items() for task in some]
    assert len(tasks) == 18
    for task in tasks:
        assert dmc.find_task(f"dmc/{task}") is not None
