"""A plant in a process of its own: after a run was interrupted, no command is sent that was sent before."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import doublehorizon as dh
from doublehorizon.run.checkpoint_writer import steps_kept
from test_cli import TINY_OPTIONS
from worlds import TINY

pytestmark = [pytest.mark.slow, pytest.mark.processes]
LONG = "--loop.seed-iterations 200 --loop.evaluation-episodes 0 --loop.time-limit 700 --termination never"


class Server:
    """The plant."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="plant-"))  # short enough for a socket's name
        self.process = subprocess.Popen([sys.executable, Path(__file__).with_name("plant.py"), self.folder])
        while not (self.folder / "socket").exists():
            time.sleep(0.05)

    def commands(self) -> list:
        return [json.loads(line) for line in (self.folder / "commands").read_text().splitlines()]

    def wait_for(self, count: int, run: subprocess.Popen) -> None:
        deadline = time.monotonic() + 60
        while len(self.commands()) < count:
            assert run.poll() is None, run.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def quiet(self) -> list:
        """The commands so far; none comes any more."""
        time.sleep(0.5)
        before = self.commands()
        time.sleep(1.5)
        assert self.commands() == before
        return before


@pytest.fixture
def plant(monkeypatch):
    server = Server()
    monkeypatch.setenv("PLANT", str(server.folder))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield server
    server.process.kill()
    server.process.wait()


def start(*words: str) -> subprocess.Popen:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from doublehorizon.cli import main"
    command = [sys.executable, "-c", f"{code}; main()", *words, "--device", "cpu"]
    return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL", "exception", "worker"])
def test_no_old_command_after_an_interruption(how, single, plant, tmp_path):
    if how == "worker" and single:
        return  # there is none
    words = shlex.split(f"{TINY_OPTIONS} {LONG}") + (["--single-env"] if single else ["--no-check"])
    run = start("train", "plant:make_env", "--steps", "4000", "--out", str(tmp_path / "run"), *words)
    plant.wait_for(300, run)
    if how == "worker":
        before = plant.commands()
        for path in Path("/proc").glob("[0-9]*/status"):
            if f"PPid:\t{run.pid}\n" in path.read_text():
                os.kill(int(path.parent.name), signal.SIGKILL)
        plant.wait_for(1000, run)
        run.send_signal(signal.SIGINT)
    elif how == "exception":
        (plant.folder / "fail").touch()
    else:
        run.send_signal(getattr(signal, how))
    run.communicate(timeout=120)
    if how != "worker":
        before = plant.quiet()
    kept = len(before) if how == "worker" else max(steps_kept(tmp_path / "run"))
    again = start("resume", str(tmp_path / "run"), "--env", "plant:make_env")
    plant.wait_for(len(plant.commands()) + 300, again)
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=120)
    new = plant.quiet()[len(before) :]
    # what the run had forgotten of its last iteration is drawn again, with the same random numbers
    old = [command for command in before if command != "reset"][: kept - 20 if how == "worker" else kept]
    assert len(old) > 200 and len(new) > 300 and "reset" in new[:21]
    assert not set(new) & set(old)


def test_no_old_command_in_a_second_learn(plant):
    import plant as module

    config = TINY.with_(termination="never", loop__time_limit=700, loop__seed_iterations=50)
    model = dh.DHMBPO(module.make_env(), config=config).learn(100)
    before = plant.commands()
    model.learn(100)
    new = plant.commands()[len(before) :]
    assert len(new) == 100 and not set(new) & set(before)  # the same episode goes on
    model.get_env().close()
