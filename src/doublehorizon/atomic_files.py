"""Files that are whole or not there at all, whenever the power fails: written aside, then renamed. No JAX."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from doublehorizon.errors import RunError, UserError

MOST_TEXT = 2**30  # bytes of a file of text, such as a log, that are read
MOST_ARRAYS = 2**36  # of one with arrays
PARTIAL = ".partial"
_MOST_TIMES = 100  # as large as it is packed: arrays of a replay are at most a tenth of that
_ALWAYS = 2**26  # bytes that an agent's file may have unpacked, however small it is
BEFORE = ".before"  # a folder that is being replaced


def read_file(path: Path, most: int = MOST_TEXT) -> bytes:
    """Content of a regular file. An `OSError` if it is none, as a pipe could be waited for without end, or larger than
    `most` bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if facts.st_size > most:
            raise OSError(errno.EFBIG, f"it has {facts.st_size} bytes, at most {most} are read")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """What a file of JSON holds; a `ValueError` if that is no JSON, or nested without end."""
    try:
        return json.loads(read_file(path))
    except RecursionError as problem:
        raise ValueError("it is nested too deeply") from problem


def require_regular(path: Path) -> None:
    """For files that a library reads itself: an `OSError` if it is a pipe or a device."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file")


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
    """Raises a `UserError` if there is a link or a pipe in the folder, or in those `inside` it: writing must neither be
    led out nor wait for a reader."""
    for root in (folder, *(folder / name for name in inside)):
        for path in root.iterdir() if root.is_dir() else ():
            if path.is_symlink():
                raise UserError(
                    f"{path} is a link, but a run folder must hold its files itself: a link could lead writing "
                    "elsewhere. Copy what it points to into its place."
                )
            if not path.is_file() and not path.is_dir():
                raise UserError(f"{path} is no file: it does not belong into a run folder. Remove it.")


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
                parts = [part for part in archive.infolist() if part.filename.startswith(prefix)]
                size = sum(part.file_size for part in parts)
                if size > max(_ALWAYS, _MOST_TIMES * path.stat().st_size):
                    raise zipfile.BadZipFile(f"its {path.stat().st_size} bytes would be {size} unpacked")
                archive.extractall(work, parts)
        except Exception as problem:  # whatever zipfile raises where one is damaged or encrypted
            raise UserError(f"{path} cannot be read as an agent: {problem}.") from problem
        try:
            yield Path(work)
        except UserError as problem:
            raise UserError(str(problem).replace(work, str(path))) from problem
