"""An agent that `save` wrote: a folder, or one file where the name ends in .zip."""

import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from doublehorizon.atomic_files import BEFORE, PARTIAL, disk_errors_reported, unpacked
from doublehorizon.errors import UserError
from doublehorizon.run.checkpoint_writer import save_agent, steps_kept
from doublehorizon.run.progress import Progress


def write_agent(progress: Progress, path: Path) -> None:
    """To a folder or file that is new, or held an agent; that one goes when the new one is complete."""
    _require_free(path)
    if not _is_one_file(path):
        save_agent(progress, path)
        return
    home = path.resolve().parent
    home.mkdir(parents=True, exist_ok=True)
    with disk_errors_reported(path), tempfile.TemporaryDirectory(dir=home) as work:
        folder, packed = Path(work) / "agent", Path(work) / "agent.zip"
        save_agent(progress, folder)
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for part in sorted(folder.rglob("*")):
                archive.write(part, part.relative_to(folder))
        packed.replace(path)


@contextmanager
def folder_of(path: Path) -> Iterator[Path]:
    """The agent's folder; what a file holds is unpacked for as long as it is needed."""
    if not path.is_file():
        yield path
        return
    with unpacked(path) as folder:
        if not steps_kept(folder):
            raise UserError(f"{path} holds no agent. Give a file or folder that save() wrote, or the folder of a run.")
        yield folder


def _is_one_file(path: Path) -> bool:
    return path.suffix == ".zip"


def _is_leftover(path: Path) -> bool:
    """Whether an earlier save left it, and nobody has put anything else there."""
    return path.is_dir() and {part.name for part in path.iterdir()} <= {"checkpoints", "policy", "replay"}


def _require_free(path: Path) -> None:
    for beside in (path.with_name(path.name + suffix) for suffix in (PARTIAL, BEFORE)):
        if beside.exists() and not _is_leftover(beside):
            raise UserError(
                f"{beside} is in the way: save() needs that name while it replaces {path.name}. Move it, or save under "
                "another name."
            )
    if (path / "config.json").exists():
        raise UserError(f"{path} holds a run. Choose another folder for the agent.")
    if path.is_dir() and not _is_one_file(path) and (steps_kept(path) or not any(path.iterdir())):
        return
    if path.is_file() and _is_one_file(path):
        with folder_of(path):  # an agent, which may be replaced
            return
    if path.exists():
        raise UserError(f"{path} is not empty and holds no agent. Choose another folder.")
