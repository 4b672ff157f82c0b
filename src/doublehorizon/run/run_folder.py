"""The folder of a run: who may write into it, and what it says of the run in `config.json`."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from doublehorizon.atomic_files import BEFORE, disk_errors_reported, locked, read_json, refuse_links, write_file
from doublehorizon.config_json import to_json
from doublehorizon.errors import UserError
from doublehorizon.run.checkpoint_reader import read_newest
from doublehorizon.run.checkpoint_writer import set_aside_newer, steps_kept
from doublehorizon.run.progress import Progress


@contextlib.contextmanager
def open_for_writing(folder: Path, step: int | None) -> Iterator[None]:
    """Inside, this process alone writes into the folder. It must not hold a run, unless that goes on from `step`."""
    _require_free(folder, step)
    refuse_links(folder, ("checkpoints", "replay", "policy"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"{folder} cannot be written: {problem}.") from problem
    with locked(folder):
        _require_free(folder, step)  # again: another process may have begun and ended a run meanwhile
        if step is not None:
            _make_sure_nobody_went_on(folder, step)
        yield


def _require_free(folder: Path, step: int | None) -> None:
    if step is None and ((folder / "eval.csv").exists() or steps_kept(folder)):
        raise UserError(
            f"{folder} already holds a run. Go on with it (doublehorizon resume {folder}, with --env where the "
            "environment is your own), or choose another folder."
        )


def _make_sure_nobody_went_on(folder: Path, step: int) -> None:
    """An agent that was loaded before another process went on must not undo what that did."""
    newest = max(steps_kept(folder), default=step)
    if newest > step and read_newest(folder)[0].path.name.removesuffix(BEFORE) != str(step):
        raise UserError(f"{folder} has gone on to step {newest}, but this agent stands at step {step}: load it again.")
    set_aside_newer(folder, step)


def count_starts(folder: Path, step: int) -> int:
    """How often a process has begun to learn from the checkpoint at this step, this one included."""
    path = folder / "starts.json"
    try:
        before = read_json(path)
        count = 1 + (int(before["starts"]) if before["step"] == step else 0)
    except (OSError, ValueError, LookupError, TypeError):
        count = 1
    with disk_errors_reported(folder):
        write_file(path, (json.dumps({"step": step, "starts": count}) + "\n").encode())
    return count


def write_config(folder: Path, progress: Progress) -> None:
    """Writes `config.json`."""
    about = {
        "env": progress.spec.facts(),
        "seeds": progress.seeds,
        "steps": progress.goal,
        "given": progress.setup.given,
        "config": to_json(progress.config),
    }
    with disk_errors_reported(folder):
        write_file(folder / "config.json", (json.dumps(about, indent=1) + "\n").encode())
