"""A run on the disk: `checkpoints/<step>/` holds everything that learning changes but the rows of the replay, which are
in files of their own (`chunks.py`). Arrays are in safetensors, the rest in JSON: nothing here can execute code.

A checkpoint is written beside the earlier ones and takes its place when it is complete. Its JSON file has the digests
of its other file, of the replay's last one, and of itself.
"""

import concurrent.futures
import json
import os
import platform
import shutil
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from safetensors.numpy import save

from doublehorizon import __version__, chunks
from doublehorizon.devices import Devices
from doublehorizon.durable import (
    BEFORE,
    digest,
    present,
    remove_partial,
    replace_folder,
    told,
    write_file,
    write_folder,
)
from doublehorizon.policy import NumpyPolicy
from doublehorizon.progress import Archived, Progress, Snapshot, largest_capacity
from doublehorizon.records import to_json
from doublehorizon.signals import unstoppable

FORMAT = "doublehorizon-checkpoint-1"
_PACKAGES = ("doublehorizon", "jax", "jaxlib", "equinox", "optax", "numpy", "gymnasium", "mujoco", "dm_control")
MOST_SHARE = 0.05  # of the time that may go into writing, unless a run is told how often to write


class NoKeeper:
    """In the place of a `Keeper`, for a run without a folder."""

    def keep_first(self, snapshot: Snapshot) -> None: ...

    def keep(self, snapshot: Snapshot) -> None: ...

    def offer(self, snapshot: Snapshot) -> None: ...

    def keep_last(self, snapshot: Snapshot) -> None: ...


class Keeper:
    """Writes a run's checkpoints, in a thread of its own: the run goes on meanwhile."""

    def __init__(self, folder: Path, progress: Progress):
        self._folder, self._progress = folder, progress
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._writing: concurrent.futures.Future | None = None
        self._begun, self._took = -np.inf, 0.0
        self._kept: tuple[int, int] | None = None

    def keep_first(self, snapshot: Snapshot) -> None:
        """Writes it, and waits."""
        self.keep(snapshot)
        self.finish()

    def offer(self, snapshot: Snapshot) -> None:
        """Writes it if it is time to."""
        is_idle = self._writing is None or self._writing.done()
        if is_idle:
            self.finish()  # what went wrong is told at once
        progress, every = self._progress, self._progress.config.loop.checkpoint_every
        if every is not None:
            is_due = snapshot.iteration % every == 0
        else:
            is_due = is_idle and time.monotonic() - self._begun >= self._took / MOST_SHARE
        # rows that the next iteration overwrites must be on their way to the disk
        next_stored = progress.stored_at(snapshot.iteration + 1)
        if is_due or progress.archived.rows < next_stored - progress.capacity:
            self.keep(snapshot)

    def keep(self, snapshot: Snapshot) -> None:
        """Begins to write it, unless it is on the disk already."""
        self.finish()
        contents = (snapshot.iteration, len(snapshot.returns))
        if contents == self._kept:
            return
        with unstoppable():
            progress, self._begun = self._progress, time.monotonic()
            archived, stored = progress.archived, progress.stored_at(snapshot.iteration)
            rows = chunks.new_rows(progress.replay, archived, stored, progress.iteration_steps)
            self._writing = self._pool.submit(self._write, snapshot, rows, stored, contents)

    def finish(self) -> None:
        """Waits for what is being written; what went wrong with it is raised here."""
        if self._writing is not None:
            concurrent.futures.wait([self._writing])
            writing, self._writing = self._writing, None
            writing.result()

    def keep_last(self, snapshot: Snapshot) -> None:
        """Writes it if it is not on the disk yet, and ends the thread."""
        try:
            self.keep(snapshot)
            self.finish()
        finally:
            self._pool.shutdown()

    def _write(self, snapshot: Snapshot, rows: chunks.Rows, stored: int, contents: tuple[int, int]) -> None:
        with told(self._folder):
            write(self._folder, self._progress, snapshot, rows, stored)
        self._kept, self._took = contents, time.monotonic() - self._begun


def set_aside_newer(folder: Path, step: int) -> None:
    """Checkpoints behind the one from which a run goes on could not be read: they get another name."""
    for newer in steps_kept(folder):
        if newer > step:
            path = present(folder / "checkpoints" / str(newer))
            path.rename(path.with_name(f"{newer}.unread-{time.time_ns()}"))


def write(folder: Path, progress: Progress, snapshot: Snapshot, rows: chunks.Rows, stored: int) -> None:
    """One checkpoint; then the policies, and what is too old goes."""
    for name in snapshot.log_sizes:
        _sync(folder / name)
    progress.archived = chunks.append(folder / "replay", rows, progress.archived, stored)
    arrays = _state_arrays(snapshot)
    content = save(arrays)
    about = _about(progress, snapshot) | {"state": digest(content)}
    sealed = json.dumps({"digest": digest(canonical(about)), "checkpoint": about}, indent=1).encode()
    step = snapshot.iteration * progress.iteration_steps * snapshot.spec.action_repeat
    write_folder(folder / "checkpoints" / str(step), {"state.safetensors": content, "checkpoint.json": sealed})
    if snapshot.policies is not None:
        save_policies(folder, progress.seeds, snapshot.policies, snapshot.returns)
    _prune(folder, progress)


def save_agent(progress: Progress, folder: Path) -> None:
    """The run as it stands, in a folder of its own; one that was there goes when the new one is complete."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    progress = replace(progress, archived=Archived())  # all rows are to be written
    rows = chunks.new_rows(progress.replay, progress.archived, progress.num_stored, progress.iteration_steps)
    with told(folder):
        try:
            write(partial, progress, progress.snapshot({}), rows, progress.num_stored)
            replace_folder(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def save_policies(
    folder: Path, seeds: list[int], policies: list[NumpyPolicy], returns: dict[int, dict[int, float]]
) -> None:
    """Writes `policy/seed<k>.safetensors`, and the returns by which `load_policy` picks the best of them."""
    for seed, policy in zip(seeds, policies, strict=True):
        policy.save(folder / "policy" / f"seed{seed}.safetensors")
    last = {str(seed): value for step in sorted(returns) for seed, value in returns[step].items()}
    write_file(folder / "policy" / "returns.json", (json.dumps(last, indent=1) + "\n").encode())


def steps_kept(folder: Path) -> list[int]:
    """The steps of a run's checkpoints, oldest first."""
    found = folder / "checkpoints"
    names = {path.name.removesuffix(BEFORE) for path in found.iterdir() if path.is_dir()} if found.is_dir() else set()
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def canonical(about: dict[str, Any]) -> bytes:
    """What the digest of a checkpoint's JSON file is taken of."""
    return json.dumps(about, sort_keys=True).encode()


def machine(devices: Devices) -> dict[str, Any]:
    """What a run must find again to go on bit for bit."""
    return {
        **{name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def state_names(tree: Any) -> list[str]:
    """Names of a record's arrays, in the order of its leaves."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.flatten_with_path(tree)[0]]


def _about(progress: Progress, snapshot: Snapshot) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": __version__,
        "machine": machine(progress.devices),
        "config": to_json(progress.config),
        "env": json.loads(json.dumps(snapshot.spec.facts())),
        "seeds": progress.seeds,
        "given": progress.given,
        "prior_rows": progress.prior_rows,
        "goal": progress.goal,
        "iteration": snapshot.iteration,
        "seconds": snapshot.seconds,
        "learnt": snapshot.policies is not None,
        "returns": {str(step): {str(k): v for k, v in row.items()} for step, row in snapshot.returns.items()},
        "pending": {
            str(step): {"seconds": test.seconds, "learnt": test.policies is not None}
            for step, test in snapshot.pending.items()
        },
        "episodes": [[*at, episode.reset_seed] for at, episode in snapshot.episodes.items()],
        "logs": snapshot.log_sizes,
        "replay": {"rows": progress.archived.rows, "digest": progress.archived.digest},
    }


def _state_arrays(snapshot: Snapshot) -> dict[str, np.ndarray]:
    state = snapshot.state
    plain = [_plain(leaf) for leaf in jax.tree.leaves(state)]
    arrays = {f"agent{name}": x for name, x in zip(state_names(state), jax.device_get(plain), strict=True)}
    for (seed, place), episode in snapshot.episodes.items():
        arrays |= {f"episode/{seed}/{place}/actions": episode.actions, f"episode/{seed}/{place}/obs": episode.obs}
    for step, test in snapshot.pending.items():
        for k, policy in enumerate(test.policies or []):
            arrays |= {f"pending/{step}/{k}/{name}": x for name, x in policy.arrays().items()}
    return {name: np.ascontiguousarray(x) for name, x in arrays.items()}


def _plain(leaf: jax.Array) -> jax.Array:
    return jr.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _prune(folder: Path, progress: Progress) -> None:
    """Keeps the last checkpoints and the rows that any of them, or a longer run from them, may need."""
    remove_partial(folder / "checkpoints")
    remove_partial(folder / "replay")
    kept = steps_kept(folder)[-progress.config.loop.keep_checkpoints :]
    for step in steps_kept(folder)[: -progress.config.loop.keep_checkpoints]:
        shutil.rmtree(present(folder / "checkpoints" / str(step)), ignore_errors=True)
    oldest = progress.prior_rows + kept[0] // progress.spec.action_repeat
    most = largest_capacity(progress.config, progress.spec.time_limit, progress.prior_rows)
    chunks.forget(folder / "replay", oldest - most)
