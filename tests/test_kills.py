"""A run that is killed again and again ends as one that never was: the real command, small sizes."""

import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from doublehorizon.run.checkpoint_reader import read_newest
from kept import differences
from test_cli import TINY_OPTIONS

# the command itself, which also says what it is doing, so that it can be killed just then
ANNOUNCED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests in the background turns it off
from doublehorizon import atomic_files
def announce(owner, name, words):
    inner = getattr(owner, name)
    def outer(*arguments, **named):
        print(f"doing {words(*arguments)}\\n", end="", file=sys.stderr, flush=True)
        return inner(*arguments, **named)
    setattr(owner, name, outer)
announce(atomic_files, "write_file", lambda path, content: f"writing {path.name}")  # before others import it
from doublehorizon.training import evaluations, live_view
announce(live_view.View, "phase", lambda self, news: news)
announce(evaluations.Evaluations, "start", lambda self: "testing")
from doublehorizon.cli import main
main()
"""
MOMENTS = ["improving", "writing state", "collecting", "fitting", "testing", "writing checkpoint", "writing 0"]


def start(*arguments: str, most_bytes: int | None = None) -> subprocess.Popen:
    """The command; it cannot write files with more than so many bytes."""
    command = [sys.executable, "-c", ANNOUNCED, *arguments]
    if most_bytes is not None:
        command = ["prlimit", f"--fsize={most_bytes}", *command]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> tuple[int, list[str]]:
    """Its status, and what it said."""
    _, words = process.communicate(timeout=300)
    return process.returncode, [line for line in words.splitlines() if not line.startswith("doing")]


def train(folder: Path, seeds: int, steps: int, *more: str) -> list[str]:
    sizes = [*TINY_OPTIONS.split(), "--seeds", str(seeds), "--steps", str(steps), *more]
    return ["train", "Pendulum-v1", "--device", "cpu", *sizes, "--out", str(folder)]


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


def survive(
    tmp_path: Path, seeds: int, steps: int, kills: int, more: tuple[str, ...] = (), again: tuple[str, ...] = ()
) -> list[str]:
    """Kills a run so often, lets it end, and names the files that are not those of a run that was left alone. `more`
    options belong to train, `again` to resume, too."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    status, words = finish(start(*train(whole, seeds, steps, *more, *again)))
    assert status == 0, words
    chance, survived = random.Random(seeds), 0
    while survived < kills:
        begun = (killed / "checkpoints" / "0").exists() or (killed / "eval.csv").exists()
        process = start(*(["resume", str(killed), *again] if begun else train(killed, seeds, steps, *more, *again)))
        moment = MOMENTS[survived % len(MOMENTS)]
        assert kill_at(process, moment, chance.uniform(0, 0.1)), f"the run ended without {moment!r}"
        survived += 1
    status, words = finish(start("resume", str(killed), *again))
    assert status == 0, words
    rows = [read_newest(folder)[0].rows for folder in (whole, killed)]
    assert all(np.array_equal(rows[0][name], rows[1][name]) for name in rows[0])
    policies = [f"policy/seed{k}.safetensors" for k in range(seeds)]
    changed = [name for name in policies if (whole / name).read_bytes() != (killed / name).read_bytes()]
    return differences(whole, killed) + changed


def test_a_run_survives_being_killed(tmp_path):
    assert not survive(tmp_path, seeds=2, steps=140, kills=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "more", "again"),
    [
        (3, ("--horizons.distribution", "0"), ()),
        (1, (), ("--seed-policy", "controller:swing")),
        (2, ("--num-envs", "3"), ()),
    ],
)
def test_a_run_survives_being_killed_seventeen_times(tmp_path, monkeypatch, seeds, more, again):
    """Three kinds of runs, fifty kills in all, spread over what a run does."""
    (tmp_path / "controller.py").write_text("def swing(obs):\n    return [2.0 * obs[2] / (abs(obs[2]) + 0.1)]\n")
    monkeypatch.chdir(tmp_path)
    width = ("--model.width", "32", "--critic.width", "32", "--policy.width", "32")
    assert not survive(tmp_path, seeds, 1200, 17, (*width, *more), again)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number):
    folder = tmp_path / "run"
    process = start(*train(folder, 2, 160))
    assert process.stderr is not None
    seen = 0
    for line in process.stderr:
        seen += line.startswith("doing fitting")
        if seen == 2:
            break
    process.send_signal(number)
    status, words = finish(process)
    assert status == 128 + number
    step = max(int(path.name) for path in (folder / "checkpoints").iterdir())
    again = f"doublehorizon resume {shlex.quote(str(folder))}"
    assert words[-1] == f"doublehorizon: stopped. The run is saved up to step {step}; go on with: {again}"
    assert step >= 40


@pytest.mark.slow
def test_a_full_disk_is_told_and_the_checkpoint_before_is_intact(tmp_path):
    folder = tmp_path / "run"
    assert finish(start(*train(folder, 1, 60)))[0] == 0
    before = {path: path.read_bytes() for path in folder.rglob("*.safetensors")}
    status, words = finish(start("resume", str(folder), "--steps", "120", most_bytes=20_000))
    assert status == 1
    assert f"{folder} cannot be written: File too large. What was saved there before is intact." in words[-1]
    assert f"doublehorizon resume {shlex.quote(str(folder))}" in words[-1]
    assert all(path.read_bytes() == content for path, content in before.items())
    assert finish(start("resume", str(folder), "--steps", "120"))[0] == 0
