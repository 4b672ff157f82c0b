"""A training run as a job: a process of its own that begins a run or goes on with it, and ends with whoever started it.

python -m doublehorizon.jobs FOLDER PARENT < job.json
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from doublehorizon.config import Config
from doublehorizon.determinism import ask_for_determinism
from doublehorizon.errors import RunError, UserError
from doublehorizon.records import from_json, to_json
from doublehorizon.runs import state_of
from doublehorizon.signals import Stopped


@dataclass(frozen=True)
class Job:
    """One variant on one task, with some seeds, to so many steps."""

    task: str
    variant: str
    config: Config
    steps: int
    seeds: int
    seed: int = 0
    device: str | None = None

    @property
    def name(self) -> str:
        """Where its run is, inside the folder of an experiment."""
        return f"{self.task.replace('/', '-').replace(':', '-')}/{self.variant}"

    def text(self) -> str:
        return json.dumps(asdict(self) | {"config": to_json(self.config)})


def read_job(text: str) -> Job:
    """The inverse of `Job.text`."""
    told = json.loads(text)
    return Job(**told | {"config": from_json(told["config"])})


def is_done(job: Job, folder: Path) -> bool:
    """Whether its run is complete. One of another kind in its place is a `UserError`: nothing is overwritten."""
    if not (folder / "config.json").exists():
        return False
    about = json.loads((folder / "config.json").read_text())
    seeds = list(range(job.seed, job.seed + job.seeds))
    if about["seeds"] != seeds or about["config"] != to_json(job.config):
        raise UserError(
            f"{folder} holds a run with other seeds or another config. Choose another folder with --out, or ask "
            "for what was asked for then."
        )
    state = state_of(folder)
    return state.state == "done" and state.step >= job.steps


def start(job: Job, folder: Path, log: IO[bytes]) -> subprocess.Popen:
    """Its process, which says in `log` what went wrong."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    if job.device is not None:
        environment["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda"}[job.device]
    process = subprocess.Popen(
        # -P: what lies in the working directory is not imported unless whoever starts it does so
        [sys.executable, "-P", "-m", "doublehorizon.jobs", str(folder), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=log,
        env=environment,
    )
    with process.stdin as stdin:  # type: ignore[union-attr]
        stdin.write(job.text().encode())
    return process


def work(job: Job, folder: Path) -> None:
    """Begins the run, or goes on with it."""
    if job.config.deterministic:
        ask_for_determinism()
    from doublehorizon.api import DHMBPO
    from doublehorizon.checkpoints import steps_kept

    if steps_kept(folder):
        DHMBPO.load(folder, env=job.task, device=job.device).resume(folder, job.steps)
        return
    if (folder / "config.json").exists():  # it ended before its first checkpoint
        shutil.rmtree(folder, ignore_errors=True)
    model = DHMBPO(job.task, seed=job.seed, seeds=job.seeds, config=job.config, device=job.device)
    if job.steps < model.random_timesteps:
        raise UserError(
            f"{job.steps} steps were asked for, but training begins with {model.random_timesteps} random steps and "
            "learns after them."
        )
    model.learn(job.steps, out=folder)


def _leave_with(parent: int) -> None:
    """Stops, and saves, soon after whoever started it has ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def _main(folder: str, parent: str) -> int:
    threading.Thread(target=_leave_with, args=(int(parent),), daemon=True).start()
    try:
        work(read_job(sys.stdin.read()), Path(folder))
    except Stopped as ended:
        return 128 + ended.number
    except (UserError, RunError, OSError) as problem:
        print(problem, file=sys.stderr)
        return 2 if isinstance(problem, UserError) else 1
    return 0


def last_words(log: Any) -> str:
    """What a process said before it failed."""
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


if __name__ == "__main__":
    os._exit(_main(*sys.argv[1:]))  # at once: a compiler may still be busy in the background
