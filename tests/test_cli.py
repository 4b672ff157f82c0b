"""The commands, as a user types them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from doublehorizon.cli import _status
from doublehorizon.config_json import from_json
from test_recorded_data import recorded
from worlds import TINY

TINY_OPTIONS = (
    "--horizons.distribution 4 --horizons.training 3 --model.members 2 --model.width 16 --model.rollout-noise 1 "
    "--fit.batch-size 16 --fit.batches-per-step 0.5 --fit.batches-per-epoch 2 --fit.base-epochs 2 "
    "--fit.first-effort 2 --critic.members 3 --critic.target-members 2 --critic.width 16 "
    "--policy.width 16 --policy.batch-size 8 --policy.discount 0.995 --policy.updates-per-step 1 "
    "--policy.refresh-every 4 --policy.ring-capacity 120 --policy.states-per-refresh 40 "
    "--loop.steps-per-iteration 20 --loop.seed-iterations 2 --loop.evaluate-every 2 --loop.evaluation-episodes 1 "
    "--loop.checkpoint-every 1 "
    "--terminator.members 2 --terminator.width 8 --terminator.batch-size 16 --terminator.batches 20"
)


def command(*words: str, cwd=None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "doublehorizon.cli", *words], capture_output=True, text=True, cwd=cwd, timeout=600
    )


def test_any_number_can_be_set_on_the_command_line(run_folder, capsys):
    words = ["train", "Pendulum-v1", "--steps", "60", "--seed", "3", "--seeds", "2", "--out", str(run_folder)]
    words += TINY_OPTIONS.split()
    done = command(*words)
    assert done.returncode == 0, done.stderr
    assert str(run_folder) in done.stdout and "final test return" in done.stdout
    assert f"kept in {run_folder / 'policy' / 'best.safetensors'}" in done.stdout
    assert "step 60/60" in done.stderr
    about = json.loads((run_folder / "config.json").read_text())
    assert from_json(about["config"]) == TINY and about["seeds"] == [3, 4]
    before = sorted((p.name, p.stat().st_mtime) for p in run_folder.iterdir())
    assert _status(words) == 2 and "already holds a run" in capsys.readouterr().err
    assert sorted((p.name, p.stat().st_mtime) for p in run_folder.iterdir()) == before


def test_a_shell_completes_commands_options_and_paths(tmp_path):
    script = command("completion", "bash").stdout
    (tmp_path / "runs").mkdir()

    def completed(*words: str) -> set[str]:
        ask = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _doublehorizon; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True, cwd=tmp_path)
        assert not done.stderr
        return set(done.stdout.split())

    assert completed("doublehorizon", "re") == {"resume", "report"}
    assert completed("doublehorizon", "train", "--horizons") == {"--horizons.distribution", "--horizons.training"}
    assert completed("doublehorizon", "eval", "ru") == {"runs"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "Pendulm-v1"], "Pendulum-v1"),
        (["train", "CartPole-v1"], "Discrete(2)"),
        (["train", "Pendulum-v1", "--steps", "0"], "--steps is 0"),
        (["train", "Pendulum-v1", "--seeds", "0"], "--seeds is 0"),
        (["train", "Hopper-v5", "--steps", "1800"], "2000 random steps"),
        (["train", "Pendulum-v1", "--preset", "fast"], "quick"),
        (["train", "Pendulum-v1", "--policy.batch-size", "100"], "multiple of model.members"),
        (["trian", "Pendulum-v1"], "train"),
        (["resume", "nowhere"], "nowhere is no folder"),
        (["resume", "."], "holds no checkpoint"),
        (["train", "Pendulum-v1", "--checkpoint-every", "0"], "--checkpoint-every is 0"),
        (["compare", "nowhere", "--reference", "nowhere"], "nowhere"),
        (["train", "Pendulum-v1", "--config"], "cannot be read as a config"),
        (["train", "Pendulum-v1", "--config", "nowhere.json"], "nowhere.json cannot be read as a config"),
        (["train", "Pendulum-v1", "--config", "a.json", "--preset", "quick"], "a.json cannot be read as a config"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert _status(words) == 2
    err = capsys.readouterr().err
    assert told in err and "Traceback" not in err and len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_process_has_the_status_and_the_streams(tmp_path):
    done = command("train", "Pendulm-v1", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_an_environment_that_fails_leaves_what_was_learnt(run_folder, tmp_path):
    (tmp_path / "failing.py").write_text(
        f"""
import gymnasium as gym, doublehorizon as dh, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from doublehorizon.cli import _status
from doublehorizon.config_json import from_json
from test_recorded_data import recorded
from worlds import TINY

class Failing(gym.Wrapper):
    steps = 0
    def step(self, action):
        self.steps += 1
        if self.steps > 70:
            raise OSError("cable unplugged")
        return self.env.step(action)

try:
    model = dh.DHMBPO(lambda: Failing(gym.make("Pendulum-v1", max_episode_steps=20)), config=TINY)
    model.learn(200, out={str(run_folder)!r})
except RuntimeError as problem:
    print("told:", str(problem).splitlines()[-1])
"""
    )
    done = subprocess.run([sys.executable, tmp_path / "failing.py"], capture_output=True, text=True, timeout=600)
    assert "told: OSError: cable unplugged" in done.stdout, done.stderr
    assert (run_folder / "policy" / "seed0.safetensors").exists()


@pytest.fixture
def optimised(monkeypatch):
    """For programs that run for longer than they compile."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=1")


def test_a_small_agent_solves_pendulum(run_folder, optimised):
    small = (
        "--preset quick --model.width 64 --critic.width 64 --policy.width 64 --model.members 2 --policy.batch-size 32 "
        "--fit.batch-size 128 --horizons.distribution 20 --horizons.training 3 --loop.evaluate-every 100"
    )
    done = command("train", "Pendulum-v1", *small.split(), "--steps", "1400", "--out", str(run_folder), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["returns"]["0"] > -250.0


@pytest.mark.slow
def test_quick_solves_pendulum(run_folder, optimised):
    done = command("train", "Pendulum-v1", "--preset", "quick", "--steps", "1400", "--out", str(run_folder), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["returns"]["0"] > -250.0


@pytest.mark.slow
def test_recorded_steps_alone_give_a_policy_and_no_random_step_is_made(run_folder, tmp_path, optimised):
    np.savez(tmp_path / "log.npz", **recorded(2000))
    words = ["train", "Pendulum-v1", "--preset", "quick", "--data", str(tmp_path / "log.npz"), "--steps", "1000"]
    done = command(*words, "--out", str(run_folder), "--json")
    assert done.returncode == 0, done.stderr
    first, *_, last = (run_folder / "eval.csv").read_text().splitlines()[1:]
    assert first.startswith("0,") and float(first.split(",")[2]) > -800.0  # before any step; random actions get -1200
    assert float(last.split(",")[2]) > -250.0


@pytest.mark.slow
def test_quick_balances_a_pole_that_may_fall(run_folder, optimised):
    """A task that terminates, with three seeds side by side."""
    words = ["train", "InvertedPendulum-v5", "--preset", "quick", "--steps", "2400", "--seeds", "3"]
    done = command(*words, "--out", str(run_folder), "--json")
    assert done.returncode == 0, done.stderr
    assert sum(json.loads(done.stdout)["returns"].values()) / 3 > 500.0
