"""What a run needs of memory and disk, and whether that is there: known before it starts."""

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from doublehorizon.algorithm.agent import untrained
from doublehorizon.algorithm.devices import Devices
from doublehorizon.algorithm.types import Task
from doublehorizon.config import Config
from doublehorizon.envs.make import EnvSpec
from doublehorizon.errors import UserError
from doublehorizon.run.progress import capacity_for, largest_capacity
from doublehorizon.schedule import steps_per_iteration


@dataclass(frozen=True)
class Needs:
    """Bytes: of a row of the replays of all seeds, of the replays in memory, and of a run folder at most."""

    row: int
    replay: int
    disk: int

    def __str__(self) -> str:
        return f"up to {_size(self.replay)} of memory for the replay buffer and {_size(self.disk)} of disk"


def needs(config: Config, spec: EnvSpec, num_seeds: int, goal: int, prior_rows: int = 0) -> Needs:
    """Of a run to `goal` simulator steps."""
    capacity = capacity_for(config, spec, goal, prior_rows)
    task = Task(spec.obs_size, spec.act_size, None, learns_termination=spec.termination != "never")
    shapes = eqx.filter_eval_shape(untrained, config, task, capacity, jax.ShapeDtypeStruct((num_seeds,), jnp.int32))
    agent, replay = (_bytes(part) for part in shapes)
    row = replay // capacity
    steps = steps_per_iteration(config, spec.time_limit)
    stored = prior_rows + -(-goal // (steps * spec.action_repeat)) * steps
    stored = min(stored, largest_capacity(config, spec.time_limit, prior_rows))
    return Needs(row, replay, stored * row + (config.loop.keep_checkpoints + 1) * agent)


def require_room(found: Needs, devices: Devices, folder: Path | None, used: int = 0) -> None:
    """Raises a `UserError` where memory or disk are too small. `used` bytes of the replays are there already."""
    free = free_memory(devices)
    if found.replay - used > free:
        most = int(0.5 * (free + used) / found.row)
        raise UserError(
            f"the transitions of this run need {_size(found.replay)} of memory, but {_size(free)} are free on "
            f"{devices[0].device_kind}. Ask for fewer steps or seeds, or keep fewer transitions: "
            f"--loop.replay-capacity {most}."
        )
    place = (
        None
        if folder is None
        else next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    )
    room = math.inf if place is None else shutil.disk_usage(place).free
    written = (
        0 if folder is None or not folder.is_dir() else sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    )
    if found.disk - written > room:
        raise UserError(
            f"{folder} may need {_size(found.disk)} of disk, but {_size(int(room))} are free. Choose another folder, "
            "ask for fewer steps or seeds, or keep fewer transitions (--loop.replay-capacity)."
        )


def free_memory(devices: Devices) -> int | float:
    """Bytes that replays may take on these devices; infinite where that is not known."""
    if devices[0].platform == "cpu":
        return min(_of_machine(), _of_container())
    found = [device.memory_stats() or {} for device in devices]
    return sum(one.get("bytes_limit", math.inf) - one.get("bytes_in_use", 0) for one in found)


def _of_machine() -> int | float:
    lines = _read(Path("/proc/meminfo"), str.splitlines) or []
    values = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
    if "MemAvailable" in values:
        return 1024.0 * int(values["MemAvailable"].split()[0])
    names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
    return math.prod(map(os.sysconf, names)) if all(name in os.sysconf_names for name in names) else math.inf


def _of_container() -> int | float:
    group = Path("/sys/fs/cgroup")
    most, now = (_read(group / f"memory.{name}", int) for name in ("max", "current"))
    if most is None or now is None:
        return math.inf
    parts = dict(line.split() for line in _read(group / "memory.stat", str.splitlines) or [])
    cached = sum(int(parts.get(name, 0)) for name in ("inactive_file", "slab_reclaimable"))  # given back when needed
    return max(0, most - now + cached)


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    """What a file of the kernel's says; None where there is none, or no limit."""
    try:
        return parse(path.read_text())
    except (OSError, ValueError):
        return None


def _bytes(tree: Any) -> int:
    def size(leaf: Any) -> int:
        data = jax.eval_shape(jax.random.key_data, leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return math.prod(data.shape) * data.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def _size(count: int | float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
