"""Environments that may be machines: no command is sent that nobody decided."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box

import doublehorizon as dh
from doublehorizon.errors import RunError
from worlds import TINY

CONFIG = TINY.with_(termination="never", loop__evaluation_episodes=0, loop__time_limit=1000)


class Plant(gym.Env):
    """Writes down every reset and every command. It never returns to where it was."""

    metadata = {"replay_episodes": False}  # noqa: RUF012 (Gymnasium's interface)
    observation_space, action_space = Box(-np.inf, np.inf, (3,)), Box(-1.0, 1.0, (1,))

    def __init__(self, log: Path):
        self.log = log

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.note("reset")
        return self.observe(), {}

    def step(self, action):
        self.note(f"{float(action[0]):.6f}")
        return self.observe(), 0.0, False, False, {}

    def observe(self):
        return self.np_random.normal(size=3).astype(np.float32)

    def note(self, what: str) -> None:
        with self.log.open("a") as file:
            file.write(what + "\n")


class Repeatable(Plant):
    """A simulator."""

    metadata = {}  # noqa: RUF012


class Elsewhere(Repeatable):
    """Its reset does not return to where it was, though it says nothing of it."""

    def observe(self):
        return np.random.default_rng().normal(size=3).astype(np.float32)


def commands(log: Path) -> list[str]:
    """Since the last call."""
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "commands"


@pytest.fixture(autouse=True)
def nothing_is_learnt(only_collecting):
    """These runs end before their first fit."""


def test_a_second_learn_continues_the_episode_of_an_object(log):
    config = CONFIG.with_(loop__seed_iterations=10)
    model = dh.DHMBPO(Plant(log), config=config, check=False).learn(20)
    assert len(commands(log)) == 1 + 20
    model.learn(40)
    assert len(found := commands(log)) == 40 and "reset" not in found


def test_an_object_that_somebody_else_has_moved_begins_a_new_episode(log, said):
    env = gym.wrappers.TimeLimit(Plant(log), 500)
    model = dh.DHMBPO(env, config=CONFIG.with_(loop__seed_iterations=10), check=False).learn(20)
    env.step(np.zeros(1, np.float32))
    commands(log)
    model.learn(20)
    assert (found := commands(log))[0] == "reset" and len(found) == 21
    assert "the interrupted episode is given up and a new one begins" in said[0]


class Skip(gym.Wrapper):
    """Holds each action for four steps, outside the time limit."""

    def step(self, action):
        for _ in range(3):
            self.env.step(action)
        return self.env.step(action)


def test_steps_that_a_wrapper_makes_are_nobody_elses(log):
    env = Skip(gym.wrappers.TimeLimit(Plant(log), 5000))
    dh.DHMBPO(env, config=CONFIG.with_(loop__seed_iterations=10), check=False).learn(60)
    assert commands(log).count("reset") == 1


def test_after_a_step_that_failed_a_new_episode_begins(log, said):
    env = Plant(log)
    model = dh.DHMBPO(env, config=CONFIG.with_(loop__seed_iterations=10), check=False).learn(20)
    model.get_env().step = lambda action: 1 // 0  # an instance's own, until it is deleted
    with pytest.raises(RunError, match="ZeroDivisionError"):
        model.learn(20)
    del env.step
    commands(log)
    model.learn(20)
    assert (found := commands(log))[0] == "reset" and len(found) == 21


@pytest.mark.parametrize("kind", [Plant, Elsewhere, "object", "never"])
def test_no_old_command_is_sent_when_a_run_is_resumed(kind, log, tmp_path, said):
    def make():
        return {"object": Repeatable(log), "never": Repeatable(log)}.get(kind) or kind(log)

    def interrupt(progress):
        if progress.step == 60:
            raise KeyboardInterrupt

    config = CONFIG.with_(loop__seed_iterations=10)
    env = make() if kind == "object" else make
    with pytest.raises(KeyboardInterrupt):
        dh.DHMBPO(env, config=config, check=False).learn(100, out=tmp_path / "run", callback=interrupt)
    commands(log)
    told = []
    again = "never" if kind == "never" else None
    model = dh.DHMBPO.load(tmp_path / "run", env=make() if kind == "object" else make, replay_episodes=again)
    model.resume(tmp_path / "run", 100, callback=lambda progress: told.append(len(said)))
    found = commands(log)
    new = len(model.progress.replay.rows.reward[0, 40:100])  # the run stood at step 40
    assert found.count("reset") == 1 and len(found) == 1 + new
    assert "the interrupted episode is given up and a new one begins" in said[0] and told[0] == 1


def test_a_simulator_continues_its_episode(log, tmp_path, said):
    config = CONFIG.with_(loop__seed_iterations=10)
    dh.DHMBPO(lambda: Repeatable(log), config=config, check=False).learn(40, out=tmp_path / "run")
    first = commands(log)
    dh.DHMBPO.load(tmp_path / "run", env=lambda: Repeatable(log)).resume(tmp_path / "run", 60)
    again = commands(log)
    assert again[: len(first)] == first and len(again) == len(first) + 20 and said == []
