"""A training run as a job: a process of its own that begins a run or goes on with it, and ends with whoever started it.

python -m doublehorizon.experiments.jobs FOLDER PARENT < job.json
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from doublehorizon.atomic_files import read_json
from doublehorizon.config import Config
from doublehorizon.config_json import from_json, from_run, to_json
from doublehorizon.errors import RunError, UserError
from doublehorizon.jax_settings import ask_for_determinism, platform_variables
from doublehorizon.run.run_reader import status_of
from doublehorizon.signals import Stopped, when_orphaned


@dataclass(frozen=True)
class Job:
    """One variant on one task: its seeds and its steps."""

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
    values = json.loads(text)
    return Job(**values | {"config": from_json(values["config"])})


def is_done(job: Job, folder: Path) -> bool:
    """Whether its run is complete. One of another kind in its place is a `UserError`: nothing is overwritten."""
    if not (folder / "config.json").exists():
        return False
    about = read_json(folder / "config.json")
    seeds = list(range(job.seed, job.seed + job.seeds))
    if about["seeds"] != seeds or from_run(about["config"]) != job.config:
        raise UserError(
            f"{folder} holds a run with other seeds or another config. Choose another folder with --out, or ask "
            "for what was asked for then."
        )
    status = status_of(folder)
    return status.state == "done" and status.step >= job.steps


def start(job: Job, folder: Path, log: IO[bytes]) -> subprocess.Popen:
    """Starts its process, which writes into `log` what went wrong."""
    paths = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    process = subprocess.Popen(
        # -P: what lies in the working directory is not imported unless whoever starts it does so
        [sys.executable, "-P", "-m", "doublehorizon.experiments.jobs", str(folder), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=log,
        env=os.environ | paths | platform_variables(job.device),
    )
    with process.stdin as stdin:  # type: ignore[union-attr]
        stdin.write(job.text().encode())
    return process


def work(job: Job, folder: Path) -> None:
    """Begins the run, or goes on with it."""
    if job.config.deterministic:
        ask_for_determinism()
    from doublehorizon.api import DHMBPO
    from doublehorizon.run.checkpoint_writer import steps_kept

    if steps_kept(folder):
        DHMBPO.load(folder, env=job.task, device=job.device).resume(folder, job.steps)
        return
    if (folder / "config.json").exists():
        if (folder / "eval.csv").exists() or (folder / "policy").exists():
            raise UserError(
                f"{folder} holds a run without a checkpoint, which can't go on. Move it, or choose another --out."
            )
        shutil.rmtree(folder, ignore_errors=True)  # it ended before its first checkpoint
    model = DHMBPO(job.task, seed=job.seed, seeds=job.seeds, config=job.config, device=job.device)
    if job.steps < model.random_timesteps:
        raise UserError(
            f"{job.steps} steps were asked for, but training begins with {model.random_timesteps} random steps and "
            "learns after them."
        )
    model.learn(job.steps, out=folder)


def _main(folder: str, parent: str) -> int:
    when_orphaned(int(parent), lambda: os.kill(os.getpid(), signal.SIGTERM))  # stops, and saves
    try:
        work(read_job(sys.stdin.read()), Path(folder))
    except Stopped as ended:
        return 128 + ended.number
    except (UserError, RunError, OSError) as problem:
        print(problem, file=sys.stderr)
        return 2 if isinstance(problem, UserError) else 1
    return 0


def last_line(log: Any) -> str:
    """What a process said before it failed."""
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


if __name__ == "__main__":
    os._exit(_main(*sys.argv[1:]))  # at once: a compiler may still be busy in the background
