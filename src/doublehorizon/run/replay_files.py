"""The replay on the disk: files of rows, `replay/<rows stored so far>.safetensors`, each written once.

Every file holds the digest of the one before it, so that the digest of the last vouches for all. Adding rows costs the
same however many there are.
"""

import functools
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from safetensors import SafetensorError
from safetensors.numpy import load, save

from doublehorizon.algorithm.replay_buffer import ReplayBuffer
from doublehorizon.atomic_files import MOST_ARRAYS, digest, read_file, write_file

ReplayArrays = dict[str, np.ndarray]
"""Fields of a replay, `[seed, row, ...]`; `held_out` has one entry per group."""


@dataclass(frozen=True)
class Archived:
    """How many rows of each replay are on the disk, and the digest of the file with the last of them."""

    rows: int = 0
    digest: str = ""


class DamageError(Exception):
    """A file that is not what was written; the message says how."""


def new_rows(replay: ReplayBuffer, archived: Archived, num_stored: int, piece: int) -> ReplayArrays:
    """The rows after those that are on the disk, as far as the replay still has them. They are fetched in pieces of one
    length, as each length is a program of its own."""
    begin = max(archived.rows, num_stored - replay.rows.reward.shape[1])
    first = begin + (num_stored - begin) % piece
    cuts = sorted({begin, *range(first, num_stored + 1, piece)})
    parts = jax.device_get([_slice(replay, start, end - start) for start, end in pairwise(cuts)])
    return {name: np.concatenate([part[name] for part in parts], axis=1) for name in (parts[0] if parts else {})}


@functools.partial(jax.jit, static_argnums=2)
def _slice(replay: ReplayBuffer, start: Int[Array, ""], length: int) -> dict[str, Array]:
    capacity, groups = replay.rows.reward.shape[1], replay.held_out.shape[1]
    group_size = capacity // groups
    rows = (start + jnp.arange(length)) % capacity
    at_groups = (start // group_size + jnp.arange(length // group_size)) % groups
    taken = {name: getattr(replay.rows, name)[:, rows] for name in replay.rows.__dataclass_fields__}
    return taken | {"weight": replay.weight[:, rows], "held_out": replay.held_out[:, at_groups]}


def append(folder: Path, rows: ReplayArrays, archived: Archived, num_stored: int) -> Archived:
    """Writes rows that end with the row number `num_stored`; nothing where there are none."""
    if not rows:
        return archived
    begin = num_stored - rows["reward"].shape[1]
    link = {
        "begin": np.asarray(begin, np.int64),
        "previous": np.frombuffer(bytes.fromhex(archived.digest), np.uint8),
    }
    content = save({name: np.ascontiguousarray(x) for name, x in rows.items()} | link)
    write_file(_path(folder, num_stored), content)
    return Archived(num_stored, digest(content))


def read(folder: Path, archived: Archived, num_rows: int) -> ReplayArrays:
    """The last `num_rows` rows, or more if a file holds more; `DamageError` if one is missing or altered."""
    parts: list[ReplayArrays] = []
    end, expected = archived.rows, archived.digest
    least = archived.rows - num_rows
    while end > least:
        rows = _verified(_path(folder, end), expected)
        try:
            begin, expected = int(rows.pop("begin")), bytes(rows.pop("previous")).hex()
            count = rows["reward"].shape[1]
        except (KeyError, TypeError, ValueError, IndexError) as problem:
            raise DamageError(f"{_path(folder, end)} holds no rows: {problem}") from problem
        if count <= 0 or begin != end - count:
            raise DamageError(f"{_path(folder, end)} does not hold the rows {begin} to {end}")
        parts.insert(0, rows)
        end = begin
    try:
        return {name: np.concatenate([part[name] for part in parts], axis=1) for name in (parts[0] if parts else {})}
    except (KeyError, ValueError) as problem:
        raise DamageError(f"the files in {folder} do not fit together: {problem}") from problem


def read_first(folder: Path, num_rows: int) -> ReplayArrays:
    """The first `num_rows` rows, or all that there are, of a run that may still be going on."""
    paths = sorted(path for path in folder.glob("*.safetensors") if path.stem.isdecimal())
    if not paths:
        raise DamageError(f"there are no rows in {folder}")
    parts: list[ReplayArrays] = []
    for path in paths:
        try:
            parts.append(load(read_file(path, MOST_ARRAYS)))
        except (SafetensorError, ValueError, TypeError) as problem:
            raise DamageError(f"{path} cannot be read: {problem}") from problem
        if int(path.stem) >= num_rows:
            break
    names = set(parts[0]) - {"begin", "previous", "held_out"}
    return {name: np.concatenate([part[name] for part in parts], axis=1)[:, :num_rows] for name in names}


def forget(folder: Path, before: int) -> None:
    """Removes files all of whose rows have numbers below `before`."""
    for path in folder.glob("*.safetensors"):
        if path.stem.isdecimal() and int(path.stem) <= before:
            path.unlink(missing_ok=True)


def _path(folder: Path, end: int) -> Path:
    return folder / f"{end:012d}.safetensors"


def _verified(path: Path, expected: str) -> ReplayArrays:
    try:
        content = read_file(path, MOST_ARRAYS)
        if digest(content) != expected:
            raise DamageError(f"{path} is damaged or not the one that belongs here")
        return load(content)
    except (FileNotFoundError, SafetensorError, ValueError, TypeError) as problem:
        raise DamageError(f"{path} cannot be read: {problem}") from problem
