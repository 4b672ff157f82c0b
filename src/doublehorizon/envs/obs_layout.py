"""From an observation with names or parts (of a Dict, a Tuple, a discrete space) to the vector that a policy takes, or
to one line that says what does not fit. NumPy alone: a robot needs neither Gymnasium nor JAX."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from doublehorizon.errors import UserError

Path = tuple[str | int, ...]
"""Where a part of an observation is found: keys of dicts, places in tuples."""


@dataclass(frozen=True)
class ObsEntry:
    """One leaf of an observation space: where it is found, and its shape. Each number of a discrete one takes one of
    so many `choices`, counted from its `start`, and is laid out one-hot."""

    path: Path
    shape: tuple[int, ...]
    choices: tuple[int, ...] = ()
    start: tuple[int, ...] = ()

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape)) or "one number"
        return f"{self.name} ({shape}{': ' if self.choices else ''}{self.ranges})".lstrip()

    @property
    def name(self) -> str:
        """Its path, joined by dots; empty where it is the whole observation."""
        return ".".join(map(str, self.path))

    @property
    def size(self) -> int:
        """Numbers that it becomes."""
        return sum(self.choices) if self.choices else math.prod(self.shape)

    @property
    def ranges(self) -> str:
        """What the numbers of a discrete entry may be."""
        return ", ".join(f"{low} to {low + n - 1}" for low, n in zip(self.start, self.choices, strict=True))

    def one_hot(self) -> tuple[np.ndarray, np.ndarray]:
        """For each place of the one-hot vector: which of the entry's numbers makes it 1, and with which value."""
        which = np.repeat(np.arange(len(self.choices)), self.choices)
        values = [low + np.arange(n) for low, n in zip(self.start, self.choices, strict=True)]
        return which, np.concatenate(values)

    def flatten(self, value: Any) -> np.ndarray:
        """Its value, or a batch `[*lead, *shape]` of them, as float32 `[*lead, size]`."""
        array = _as_numbers(value, self.path)
        lead = array.shape[: array.ndim - len(self.shape)]
        if array.shape[len(lead) :] != self.shape:
            raise UserError(
                f"{_the(self.path)} has the shape {array.shape}, but this policy needs {self.shape}, or a batch of it."
            )
        flat = array.reshape(*lead, math.prod(self.shape))
        return (self._hot(flat) if self.choices else flat).astype(np.float32)

    def _hot(self, flat: np.ndarray) -> np.ndarray:
        which, values = self.one_hot()
        hot = flat[..., which] == values
        is_wrong = hot.sum(axis=-1) != len(self.choices)
        if is_wrong.any():
            raise UserError(
                f"{_the(self.path)} is {flat[is_wrong][0].tolist()}, but this policy needs whole numbers from "
                f"{self.ranges}."
            )
        return hot


@dataclass(frozen=True)
class ObsLayout:
    """The entries of an observation in the order in which a policy takes them, and the shape of its actions."""

    entries: tuple[ObsEntry, ...]
    act_shape: tuple[int, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.entries))

    @property
    def size(self) -> int:
        """Numbers of a flat observation."""
        return sum(entry.size for entry in self.entries)

    @property
    def names(self) -> list[str]:
        """Of each number of a flat observation."""
        return [
            f"{entry.name or 'o'}{f'[{i}]' if entry.size > 1 else ''}"
            for entry in self.entries
            for i in range(entry.size)
        ]

    def flatten(self, obs: Any) -> np.ndarray:
        """One observation, or a batch whose every entry is `[*lead, *shape]`, as float32 `[*lead, size]`."""
        found = dict(self._leaves(obs, [entry.path for entry in self.entries], ()))
        parts = [entry.flatten(found[entry.path]) for entry in self.entries]
        for entry, part in zip(self.entries, parts, strict=True):
            if part.shape[:-1] != parts[0].shape[:-1]:
                raise UserError(
                    f"{_the(entry.path)} is a batch of the shape {part.shape[:-1]}, but {self.entries[0].name} one of "
                    f"{parts[0].shape[:-1]}: this policy needs the same for all entries."
                )
        return np.concatenate(parts, axis=-1)

    def _leaves(self, obs: Any, paths: list[Path], place: Path) -> Iterator[tuple[Path, Any]]:
        """What is found at these paths, where `obs` is the part of the observation at `place`."""
        if place in paths:
            yield place, obs
            return
        depth = len(place)
        keys = list(dict.fromkeys(path[depth] for path in paths))
        self._check_keys(obs, keys, place)
        for key in keys:
            yield from self._leaves(obs[key], [path for path in paths if path[depth] == key], (*place, key))

    def _check_keys(self, obs: Any, keys: list[str | int], place: Path) -> None:
        """A part must hold what is needed and nothing else: what it holds beyond may be a needed one, misspelt."""
        is_named = isinstance(keys[0], str)
        if not isinstance(obs, Mapping if is_named else tuple | list):
            kind = "dict" if is_named else "tuple"
            raise UserError(f"{_the(place)} is {_kind(obs)}, but this policy needs a {kind}: {self}.")
        given = list(obs if is_named else range(len(obs)))
        wrong = [*(f"no entry {key!r}" for key in keys if key not in given)]
        wrong += [f"an unknown entry {key!r}" for key in given if key not in keys]
        if wrong:
            raise UserError(f"{_the(place)} is {_kind(obs)}, with {wrong[0]}, but this policy needs {self}.")

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` is the inverse."""
        names = [field.name for field in fields(ObsEntry)]
        entries = [{name: list(getattr(entry, name)) for name in names} for entry in self.entries]
        return {"entries": entries, "act_shape": list(self.act_shape)}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "ObsLayout":
        """The layout that was saved."""
        entries = [{name: tuple(values) for name, values in entry.items()} for entry in saved["entries"]]
        return cls(tuple(ObsEntry(**entry) for entry in entries), tuple(saved["act_shape"]))


def _the(path: Path) -> str:
    return f"the observation's {'.'.join(map(str, path))}" if path else "the observation"


def _as_numbers(value: Any, path: Path) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:  # rows of unequal length
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        given = "text" if array.dtype.kind in "US" else _kind(value)
        raise UserError(f"{_the(path)} is {given}, but this policy needs an array of numbers.")
    return array


def _kind(value: Any) -> str:
    """What was given, in words."""
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} of the shape {value.shape}"
    return f"of the type {type(value).__name__}"
