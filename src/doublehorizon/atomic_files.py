"""Files that are whole or not there at all, whenever the power fails: written aside, then renamed. No JAX."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from doublehorizon.errors import RunError, UserError

PARTIAL = ".partial"
BEFORE = ".before"  # a folder that is being replaced


def digest(content: bytes) -> str:
    """SHA-256, by which damage is recognised."""
    return hashlib.sha256(content).hexdigest()


def write_file(path: Path, content: bytes) -> None:
    """Replaces the file in one step, once its content is safely on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()  # a full disk needs the room
        raise
    sync_folder(path.parent)


def write_folder(path: Path, contents: dict[str, bytes]) -> None:
    """Replaces a folder of files in one step. What was there before is never gone: see `existing_folder`."""
    partial = path.with_name(path.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for name, content in contents.items():
            write_file(partial / name, content)
        replace_folder(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def replace_folder(new: Path, path: Path) -> None:
    """Moves a complete folder to its place; one that was there is set aside, and then removed."""
    aside = _aside(path)
    if path.exists():
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    try:
        new.rename(path)
    except OSError:
        if aside.exists():
            aside.rename(path)
        raise
    sync_folder(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def existing_folder(path: Path) -> Path:
    """Where a folder is, even if a process ended while it was being replaced."""
    return _aside(path) if not path.exists() and _aside(path).exists() else path


def _aside(path: Path) -> Path:
    return path.with_name(path.name + BEFORE)


def remove_partial(folder: Path) -> None:
    """Removes what an earlier process left half-written."""
    for path in folder.glob(f"*{PARTIAL}"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes names in a folder as safe as the files' contents."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_links(folder: Path, inside: tuple[str, ...] = ()) -> None:
    """Raises a `UserError` if there is a link in the folder, or in those `inside` it: writing must not be led out."""
    for root in (folder, *(folder / name for name in inside)):
        for path in root.iterdir() if root.is_dir() else ():
            if path.is_symlink():
                raise UserError(
                    f"{path} is a link, but a run folder must hold its files itself: a link could lead writing "
                    "elsewhere. Copy what it points to into its place."
                )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps a second process from writing into the same folder. The lock ends with this process, however that ends."""
    try:
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as problem:
        raise UserError(f"{folder} cannot be written: {problem.strerror}.") from problem
    try:
        if not _acquired(lock):
            raise UserError(f"another process is training in {folder}. Wait for it, or end it first.")
        yield
    finally:
        os.close(lock)


def _acquired(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: better without one than not at all
        return True
    return True


@contextlib.contextmanager
def disk_errors_reported(folder: Path) -> Iterator[None]:
    """An `OSError` inside (a full disk, say) becomes a `RunError` that names the folder."""
    try:
        yield
    except OSError as problem:
        raise RunError(
            f"{folder} cannot be written: {problem.strerror or problem}. What was saved there before is intact."
        ) from problem


@contextlib.contextmanager
def unpacked(path: Path, prefix: str = "") -> Iterator[Path]:
    """What a saved agent's file holds under names that begin with `prefix`, in a folder for as long as it is needed.
    Mistakes name the file: nobody knows that folder."""
    with tempfile.TemporaryDirectory() as work:
        try:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(work, [name for name in archive.namelist() if name.startswith(prefix)])
        except (zipfile.BadZipFile, OSError) as problem:
            raise UserError(f"{path} cannot be read as an agent: {problem}.") from problem
        try:
            yield Path(work)
        except UserError as problem:
            raise UserError(str(problem).replace(work, str(path))) from problem
