"""Transitions that were recorded before, for people who cannot start with random steps."""

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from doublehorizon.acting.env_runner import Batch
from doublehorizon.action_scaling import to_unit
from doublehorizon.atomic_files import require_regular
from doublehorizon.envs.make import EnvSpec
from doublehorizon.envs.spaces import flat_observation
from doublehorizon.errors import UserError

Source = str | Path | Mapping[str, Any]
"""An `.npz` file, `minari:DATASET`, or arrays by name."""

_NAMES = {
    "obs": ("obs", "observations"),
    "act": ("act", "actions"),
    "reward": ("reward", "rewards"),
    "next_obs": ("next_obs", "next_observations"),
    "terminated": ("terminated", "terminals", "terminations"),
}
_FEWEST = 100  # rows, of which every fifth is held out for validation


def load_transitions(source: Source, spec: EnvSpec, group_size: int) -> Batch:
    """The source's transitions, flat and with actions in [-1, 1], as many as fill whole groups of `group_size`."""
    name = str(source) if isinstance(source, str | Path) else "data"
    batch = {key: _as_rows(name, key, value, spec) for key, value in _read(source, spec).items()}
    recorded = len(batch["obs"])
    for key, value in batch.items():
        if len(value) != recorded:
            raise UserError(f"{name} has {len(value)} rows of {key}, but {recorded} of obs.")
    num_rows = recorded // group_size * group_size
    if num_rows < _FEWEST:
        raise UserError(f"{name} has {recorded} transitions, but at least {_FEWEST} are needed.")
    batch = {key: value[:num_rows] for key, value in batch.items()}
    for key, value in batch.items():
        if not np.isfinite(value).all():
            row = int(np.argwhere(~np.isfinite(value.reshape(num_rows, -1)).all(axis=1))[0, 0])
            raise UserError(f"{name} has values of {key} that are not finite, the first in row {row}.")
    low, high = np.asarray(spec.action_low, np.float32), np.asarray(spec.action_high, np.float32)
    act = to_unit(batch["act"], low, high)
    if np.abs(act).max() > 1.001:
        raise UserError(
            f"{name} has actions from {batch['act'].min():.4g} to {batch['act'].max():.4g}, beyond the bounds of "
            f"{spec.name} ({low.min():.4g} to {high.max():.4g}). Actions must be in the environment's own units."
        )
    if not np.isin(batch["terminated"], (0.0, 1.0)).all():
        raise UserError(f"{name} has values of terminated other than 0 and 1.")
    return batch | {"act": np.clip(act, -1.0, 1.0)}


def _as_rows(name: str, key: str, value: Any, spec: EnvSpec) -> np.ndarray:
    """An array of transitions as float32 rows of the size that the environment has."""
    if key in ("obs", "next_obs") and isinstance(value, Mapping | tuple) and spec.layout is not None:
        value = spec.layout.flatten(value)
    try:
        rows = np.asarray(value, np.float32)
    except (TypeError, ValueError) as problem:
        kind = f"a {type(value).__name__}" if isinstance(value, Mapping) else "something else"
        raise UserError(f"{name} has {kind} as {key}, but an array of numbers is needed.") from problem
    size = {"obs": spec.obs_size, "act": spec.act_size, "next_obs": spec.obs_size}.get(key)
    count = rows.shape[0] if rows.ndim else 0
    shape = (count,) if size is None else (count, size)
    if rows.size != math.prod(shape) or not rows.ndim:
        names = f": {', '.join(spec.obs_names)}" if spec.layout is not None and "obs" in key else ""
        raise UserError(f"{name} has {key} of the shape {rows.shape}, but {spec.name} needs {shape}{names}.")
    return rows.reshape(shape)


def longest_recorded_cut(batch: Batch) -> int:
    """Steps of the longest recorded episode that was cut off: its last row did not end it, and the next row does not
    begin where it stopped. 0 where none was, or where rows do not follow each other at all."""
    follows = (batch["next_obs"][:-1] == batch["obs"][1:]).all(axis=1)
    if follows.mean() < 0.5:  # in any order: nothing is known of their episodes
        return 0
    last = np.flatnonzero(~follows | (batch["terminated"][:-1] > 0))
    lengths = np.diff(last, prepend=-1)
    return int(np.max(lengths, initial=0, where=batch["terminated"][last] == 0))


def _read(source: Source, spec: EnvSpec) -> dict[str, Any]:
    """Arrays by our names."""
    if isinstance(source, str) and source.startswith("minari:"):
        return _from_minari(source.removeprefix("minari:"))
    if isinstance(source, str | Path):
        try:
            require_regular(Path(source))
            with np.load(source, allow_pickle=False) as file:
                found: Mapping[str, Any] = dict(file)
        except (OSError, ValueError, TypeError, EOFError, MemoryError, zipfile.BadZipFile) as problem:
            why = problem.strerror if isinstance(problem, OSError) and problem.strerror else "it is none"
            raise UserError(f"{source} cannot be read as an .npz file of transitions: {why}.") from problem
    else:
        found = source
    found = _joined_entries(found, spec)
    batch = {}
    for ours, names in _NAMES.items():
        present = [name for name in names if name in found]
        if not present:
            raise UserError(
                f"{'the data' if isinstance(source, Mapping) else source} has no array {' or '.join(names)}; it has "
                f"{', '.join(sorted(found)) or 'none'}. Needed are obs, act, reward, next_obs and terminated."
            )
        batch[ours] = found[present[0]]
    return batch


def _joined_entries(found: Mapping[str, Any], spec: EnvSpec) -> Mapping[str, Any]:
    """Where a file has an array for each entry of the observation, `obs.temperature` and so on: these side by side."""
    if spec.layout is None:
        return found
    joined = dict(found)
    for key in ("obs", "next_obs"):
        parts = [(entry, f"{key}.{entry.name}") for entry in spec.layout.entries]
        if key not in found and all(name in found for _, name in parts):
            joined[key] = np.concatenate([entry.flatten(found[name]) for entry, name in parts], axis=-1)
    return joined


def _from_minari(dataset_id: str) -> dict[str, Any]:
    try:
        import minari  # type: ignore[import-not-found]
    except ImportError as problem:
        raise UserError(
            "reading a Minari dataset needs the package minari: pip install 'doublehorizon[minari]'."
        ) from problem
    try:
        dataset = minari.load_dataset(dataset_id)
    except Exception as problem:  # Minari raises what its storage raises
        raise UserError(
            f"there is no Minari dataset {dataset_id!r} here: {problem}. Fetch it with minari download {dataset_id}."
        ) from problem
    space = dataset.observation_space
    parts: dict[str, list[Any]] = {name: [] for name in _NAMES}
    for episode in dataset.iterate_episodes():
        flat = np.stack([flat_observation(space, obs) for obs in _unstacked(space, episode.observations)])
        parts["obs"].append(flat[:-1])
        parts["next_obs"].append(flat[1:])
        parts["act"].append(np.asarray(episode.actions).reshape(len(flat) - 1, -1))
        parts["reward"].append(episode.rewards)
        parts["terminated"].append(episode.terminations)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _unstacked(space: Any, stacked: Any) -> list[Any]:
    """An episode's observations one by one: Minari stacks the leaves of dicts and tuples."""
    if isinstance(space, spaces.Dict):
        columns = {name: _unstacked(part, stacked[name]) for name, part in space.spaces.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if isinstance(space, spaces.Tuple):
        return list(zip(*(_unstacked(part, one) for part, one in zip(space.spaces, stacked, strict=True)), strict=True))
    return list(stacked)
