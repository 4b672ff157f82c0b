"""The folder of a run: who may write into it, and what it says of the run in `config.json`."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from doublehorizon.checkpoints import steps_kept
from doublehorizon.durable import locked, refuse_links, told, write_file
from doublehorizon.errors import UserError
from doublehorizon.progress import Progress
from doublehorizon.records import to_json


@contextlib.contextmanager
def opened(folder: Path, goes_on: bool) -> Iterator[None]:
    """Inside, this process alone writes into the folder. Unless a run goes on in it, it must not hold one."""
    if not goes_on and ((folder / "eval.csv").exists() or steps_kept(folder)):
        raise UserError(
            f"{folder} already holds a run. Go on with it (doublehorizon resume {folder}), or choose another folder."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"{folder} cannot be written: {problem}.") from problem
    with locked(folder):
        refuse_links(folder)
        yield


def describe(folder: Path, progress: Progress) -> None:
    """Writes `config.json`."""
    about = {
        "env": progress.spec.facts(),
        "seeds": progress.seeds,
        "steps": progress.goal,
        "given": progress.given,
        "config": to_json(progress.config),
    }
    with told(folder):
        write_file(folder / "config.json", (json.dumps(about, indent=1) + "\n").encode())
