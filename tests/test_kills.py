"""A run that is killed again and again ends as one that never was: the real command, small sizes."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from test_checkpoints import same_end

# the command itself, which also says what it is doing, so that it can be killed just then
ANNOUNCED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests in the background turns it off
from doublehorizon import durable, evaluations, logs
def announce(owner, name, words):
    inner = getattr(owner, name)
    def outer(*arguments, **named):
        print("doing", words(*arguments), file=sys.stderr, flush=True)
        return inner(*arguments, **named)
    setattr(owner, name, outer)
announce(logs.View, "phase", lambda self, news: news)
announce(durable, "write_file", lambda path, content: f"writing {path.name}")
announce(evaluations.Evaluations, "start", lambda self: "testing")
from doublehorizon.cli import main
main()
"""
MOMENTS = ["collecting", "fitting", "improving", "testing", "writing state", "writing checkpoint", "writing 0"]
SIZES = """--preset quick --device cpu --model.members 2 --model.width 16 --critic.width 16 --policy.width 16
    --policy.batch-size 8 --policy.refresh-every 4 --policy.ring-capacity 120 --policy.states-per-refresh 40
    --horizons.distribution 4 --fit.batch-size 16 --fit.base-epochs 2 --loop.steps-per-iteration 20
    --loop.seed-iterations 2 --loop.evaluate-every 1 --loop.evaluation-episodes 1 --checkpoint-every 1""".split()


def start(*arguments: str) -> subprocess.Popen:
    quick = {
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", os.path.abspath(".jax_cache")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, "-c", ANNOUNCED, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | quick)


def train(folder: Path, seeds: int, steps: int) -> list[str]:
    return ["train", "Pendulum-v1", *SIZES, "--seeds", str(seeds), "--steps", str(steps), "--out", str(folder)]


def kill_at(process: subprocess.Popen, moment: str, delay: float) -> bool:
    """Waits for the moment, and a little; False if the process ended before."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(f"doing {moment}"):
            time.sleep(delay)
            break
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    return process.returncode == -signal.SIGKILL


def survive(tmp_path: Path, seeds: int, steps: int, kills: int) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start(*train(whole, seeds, steps))
    _, words = process.communicate(timeout=300)
    assert process.returncode == 0, words[-2000:]
    chance, survived = random.Random(seeds), 0
    while survived < kills:
        begun = (killed / "checkpoints" / "0").exists() or (killed / "eval.csv").exists()
        process = start(*(["resume", str(killed)] if begun else train(killed, seeds, steps)))
        moment = MOMENTS[survived % len(MOMENTS)]
        assert kill_at(process, moment, chance.uniform(0, 0.1)), f"the run ended before {kills} kills"
        survived += 1
    process = start("resume", str(killed))
    _, words = process.communicate(timeout=300)
    assert process.returncode == 0, words[-2000:]
    same_end(whole, killed)
    policies = [folder / "policy" / f"seed{k}.safetensors" for folder in (whole, killed) for k in range(seeds)]
    for one, other in zip(policies[:seeds], policies[seeds:], strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_a_run_survives_being_killed(tmp_path):
    survive(tmp_path, seeds=1, steps=200, kills=3)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 3])
def test_a_run_survives_being_killed_twenty_times(tmp_path, seeds):
    survive(tmp_path, seeds, steps=1200, kills=20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number):
    folder = tmp_path / "run"
    process = start(*train(folder, 1, 4000))
    assert process.stderr is not None
    seen = 0
    for line in process.stderr:
        seen += line.startswith("doing fitting")
        if seen == 3:
            break
    process.send_signal(number)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    last = [line for line in words.splitlines() if not line.startswith("doing")][-1]
    step = max(int(path.name) for path in (folder / "checkpoints").iterdir())
    assert last == (
        f"doublehorizon: stopped. The run is saved up to step {step}; go on with: doublehorizon resume {folder}"
    )
    assert step >= 60
