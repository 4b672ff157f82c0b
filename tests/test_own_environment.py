"""A newcomer with an environment of their own, through everything that newcomers have stumbled over, in order."""

import csv
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from test_cli import TINY_OPTIONS

ROBOT = """
import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict


class Robot(gym.Env):
    observation_space = Dict({"place": Box(-9.0, 9.0, (1,), np.float32), "goal": Box(-9.0, 9.0, (1,), np.float32)})
    action_space = Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = self.np_random.uniform(-1.0, 1.0), 0
        return self.observe(), {}

    def observe(self):
        return {"place": np.array([self.place], np.float32), "goal": np.zeros(1, np.float32)}

    def step(self, action):
        self.place, self.steps = self.place + 0.3 * float(action[0]), self.steps + 1
        return self.observe(), -abs(self.place), abs(self.place) > 3.0, self.steps >= 25, {}


def make_env():
    return Robot()
"""

IN_PYTHON = """
import io, contextlib
import gymnasium as gym
import doublehorizon as dh
from robot import make_env

def refused(call, words):
    try:
        call()
    except dh.UserError as problem:
        assert words in str(problem) and "\\n" not in str(problem), problem
    else:
        raise AssertionError(words)

small = dh.presets.quick.with_(loop__steps_per_iteration=20, loop__seed_iterations=2, model__width=16, policy__width=16)
assert {"DHMBPO", "Config", "presets", "callbacks", "trackers", "load_policy"} <= set(dir(dh))
dh.DHMBPO(make_env, config="quick")
refused(lambda: dh.DHMBPO(make_env, config="quik"), "quick")
refused(lambda: dh.DHMBPO(make_env, gamma=0.9), "policy__discount")
refused(lambda: dh.DHMBPO(gym.make_vec("Pendulum-v1", num_envs=2)), "one")
refused(lambda: dh.DHMBPO(make_env, config=small).learn(60, callback=3), "callback")
refused(lambda: dh.DHMBPO(make_env, config=small).learn(60, verbose=1), "progress_bar=True")

best = dh.callbacks.SaveBest("best.safetensors")
model = dh.DHMBPO(make_env, config=small)
model.learn(60, progress_bar=True, callback=[best, dh.callbacks.StopAtReturn(1e9)])
assert "Robot" in str(model) and len(str(model).splitlines()) < 8
model.save("agent.zip")
print(dh.load_policy("agent.zip").predict({"place": [0.5], "goal": [0.0]})[0].shape)
again = dh.DHMBPO.load("agent.zip", env=make_env)
again.set_env(make_env())
assert again.get_env().unwrapped.__class__.__name__ == "Robot"
"""


@pytest.mark.slow
def test_everything_that_newcomers_stumbled_over(tmp_path):
    (tmp_path / "robot.py").write_text(ROBOT)
    (tmp_path / "try.py").write_text(IN_PYTHON)

    def command(*words: str, status: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "doublehorizon", *words], capture_output=True, text=True, cwd=tmp_path, timeout=600
        )
        assert done.returncode == status, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    tiny = TINY_OPTIONS.split()
    # what is wrong is one line
    for words, line in (
        (["train", "robot.py:make_env"], "robot:make_env"),
        (["train", "robot:make_en"], "Did you mean 'make_env'"),
        (["train", "robot:make_env", "--gamma", "0.9"], "--policy.discount"),
        (["train", "robot:make_env", "--steps", "10", *tiny], "random steps"),
        (["train", "robot:make_env", "--device", "gpu", *tiny], "GPU"),
        (["train", "robot:make_env", "--policy.discount", "1.5"], "policy.discount is 1.5"),
    ):
        told = command(*words, status=2)
        assert line in told and len(told.strip().splitlines()) == 1, told
    # short help, in whole sentences
    short = command("train", "--help")
    assert len(short.splitlines()) < 80 and "{None}" not in short and "--policy.width" not in short
    assert "--policy.width" in command("train", "--help-all")

    # stopped with Ctrl-C; the hint is the whole command
    first = _stopped(tmp_path, ["train", "robot:make_env", "--steps", "1e6", "--out", "one", "--tensorboard", *tiny])
    assert "cut after 1000 steps" in first
    assert "NaN or Inf" not in first
    hint = next(line.partition("go on with: ")[2] for line in first.splitlines() if "go on with: " in line)
    program, *again = shlex.split(hint)
    assert program == "doublehorizon" and "--env" in again and list(tmp_path.glob("one/tensorboard/seed0/*"))
    step = int(first.partition("saved up to step ")[2].split(";")[0])
    told = command(*again, "--steps", str(step + 40))
    assert "iteration 0" not in told and "final test return" in told and "at the start it was" in told
    assert "is complete" in command(*again)
    command("resume", "one", status=2)  # what a file names is not imported

    with (tmp_path / "one" / "progress.csv").open() as file:
        lengths = [row["rollout/ep_len_mean"] for row in csv.DictReader(file)]
    assert "25" in lengths
    command("train", "robot:make_env", "--steps", "80", "--seeds", "2", "--out", "two", *tiny)
    command("train", "robot:make_env", "--steps", "80", "--seeds", "2", "--seed", "5", "--out", "three", *tiny)
    assert "95%" in command("compare", "two", "three")
    assert "robot:make_env" in command("list", ".")
    assert "place" in command("analyze", "model", "two", "--env", "robot:make_env", "--horizon", "5")
    command("train", "robot:make_env", "--config", "two/config.json", "--steps", "60", "--out", "four")
    done = subprocess.run([sys.executable, "try.py"], capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0 and "(1,)" in done.stdout, done.stderr
    assert (tmp_path / "best.safetensors").exists()


def _stopped(folder: Path, words: list[str]) -> str:
    """What a run prints that is stopped with Ctrl-C once it has learnt."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    restore = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    process = subprocess.Popen(
        [sys.executable, "-c", f"{restore}from doublehorizon.cli import main; sys.argv[1:] = {words!r}; main()"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=folder,
        env=environment,
    )
    assert process.stderr is not None
    begun, seen = time.monotonic(), ""
    while "step 80/" not in seen and time.monotonic() - begun < 300:
        seen += process.stderr.readline()
    process.send_signal(signal.SIGINT)
    seen += process.communicate(timeout=120)[1]
    assert process.returncode == 130, seen
    return seen
