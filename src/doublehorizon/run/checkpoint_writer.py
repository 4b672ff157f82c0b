"""A run on the disk: `checkpoints/<step>/` holds its `RunState`; the rows of the replay are in files of their own
(`replay_files.py`). Arrays are in safetensors, the rest in JSON: nothing here can execute code.

A checkpoint is written beside the earlier ones and takes its place when it is complete. Its JSON file has the digests
of its other file, of the replay's last one, and of itself.
"""

import concurrent.futures
import errno
import json
import os
import platform
import shutil
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from doublehorizon import __version__
from doublehorizon.acting.policy import NumpyPolicy
from doublehorizon.algorithm.devices import Devices
from doublehorizon.atomic_files import (
    BEFORE,
    digest,
    disk_errors_reported,
    existing_folder,
    remove_partial,
    replace_folder,
    write_file,
    write_folder,
)
from doublehorizon.config_json import to_json
from doublehorizon.run import replay_files
from doublehorizon.run.progress import Progress, RunSetup, largest_capacity
from doublehorizon.run.replay_files import Archived
from doublehorizon.run.run_state import RunState, encode
from doublehorizon.signals import unstoppable

FORMAT = "doublehorizon-checkpoint-1"
_PACKAGES = ("doublehorizon", "jax", "jaxlib", "equinox", "optax", "numpy", "gymnasium", "mujoco", "dm_control")
MOST_SHARE = 0.05  # of the time that may go into writing, where `loop.checkpoint_every` is None


class NoCheckpoints:
    """In the place of a `CheckpointWriter`, for a run without a folder."""

    def write_first(self, state: RunState) -> None: ...

    def write(self, state: RunState) -> None: ...

    def write_if_due(self, state: RunState) -> None: ...

    def write_last(self, state: RunState) -> None: ...


class CheckpointWriter:
    """Writes a run's checkpoints, in a thread of its own: the run goes on meanwhile."""

    def __init__(self, folder: Path, progress: Progress):
        self._folder, self._progress = folder, progress
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._writing: concurrent.futures.Future | None = None
        self._begun, self._took = -np.inf, 0.0
        self._written: tuple[int, ...] | None = None

    def write_first(self, state: RunState) -> None:
        """Writes a checkpoint of this state, and waits."""
        self.write(state)
        self.finish()

    def write_if_due(self, state: RunState) -> None:
        """Writes a checkpoint of this state if it is time to."""
        is_idle = self._writing is None or self._writing.done()
        if is_idle:
            self.finish()  # what went wrong is raised at once
        setup, machinery = self._progress.setup, self._progress.machinery
        every = setup.config.loop.checkpoint_every
        if every is not None:
            is_due = state.iteration % every == 0
        else:
            is_due = is_idle and time.monotonic() - self._begun >= self._took / MOST_SHARE
        # rows that the next iteration overwrites must be on their way to the disk
        next_stored = setup.stored_at(state.iteration + 1)
        if is_due or machinery.archived.rows < next_stored - self._progress.capacity:
            self.write(state)

    def write(self, state: RunState) -> None:
        """Begins to write a checkpoint of this state, unless it is on the disk already."""
        self.finish()
        num_ahead = 0 if state.ahead is None else state.ahead["reward"].shape[1]
        contents = (state.iteration, len(state.returns), num_ahead)
        if contents == self._written:
            return
        with unstoppable():
            progress, self._begun = self._progress, time.monotonic()
            rows = new_rows(progress, progress.machinery.archived, state)
            self._writing = self._pool.submit(self._write, state, rows, contents)

    def finish(self) -> None:
        """Waits for what is being written; what went wrong with it is raised here."""
        if self._writing is not None:
            concurrent.futures.wait([self._writing])
            writing, self._writing = self._writing, None
            writing.result()

    def write_last(self, state: RunState) -> None:
        """Writes a checkpoint of this state if it is not on the disk yet, and ends the thread."""
        try:
            self.write(state)
            self.finish()
        finally:
            self._pool.shutdown()

    def _write(self, state: RunState, rows: replay_files.ReplayArrays, contents: tuple[int, ...]) -> None:
        setup, machinery = self._progress.setup, self._progress.machinery
        with disk_errors_reported(self._folder):
            machinery.archived = write(self._folder, setup, state, rows, machinery.archived)
        self._written, self._took = contents, time.monotonic() - self._begun


def new_rows(progress: Progress, archived: Archived, state: RunState) -> replay_files.ReplayArrays:
    """Rows of the replay that a checkpoint of this state needs and the disk does not have."""
    stored, piece = progress.setup.stored_at(state.iteration), progress.setup.iteration_steps
    return replay_files.new_rows(progress.replay, archived, stored, piece)


def set_aside_newer(folder: Path, step: int) -> None:
    """Renames checkpoints newer than `step`, from which a run goes on because they could not be read."""
    for newer in steps_kept(folder):
        if newer > step:
            path = existing_folder(folder / "checkpoints" / str(newer))
            path.rename(path.with_name(f"{newer}.unread-{time.time_ns()}"))


def write(
    folder: Path, setup: RunSetup, state: RunState, rows: replay_files.ReplayArrays, archived: Archived
) -> Archived:
    """One checkpoint; then the policies, and what is too old goes. What of the replay is on the disk now."""
    for name in state.log_sizes:
        _sync(folder / name)
    archived = replay_files.append(folder / "replay", rows, archived, setup.stored_at(state.iteration))
    about, arrays = encode(state)
    content = save(arrays)
    about = _about_run(setup, state) | about
    about |= {"replay": {"rows": archived.rows, "digest": archived.digest}, "state": digest(content)}
    sealed = json.dumps({"digest": digest(canonical(about)), "checkpoint": about}, indent=1).encode()
    step = state.iteration * setup.iteration_steps * setup.spec.action_repeat
    write_folder(folder / "checkpoints" / str(step), {"state.safetensors": content, "checkpoint.json": sealed})
    if state.policies is not None:
        save_policies(folder, setup.seeds, state.policies, state.returns)
    _prune(folder, setup)
    return archived


def save_agent(progress: Progress, folder: Path) -> None:
    """The run as it stands, in a folder of its own; one that was there goes when the new one is complete."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    state = replace(progress.state, log_sizes={})
    rows = new_rows(progress, Archived(), state)  # all of them
    with disk_errors_reported(folder):
        try:
            write(partial, progress.setup, state, rows, Archived())
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


def _about_run(setup: RunSetup, state: RunState) -> dict[str, Any]:
    """What a checkpoint says of its run beside the state."""
    spec = replace(setup.spec, termination=state.termination)
    return {
        "format": FORMAT,
        "version": __version__,
        "machine": machine(setup.devices),
        "config": to_json(setup.config),
        "env": json.loads(json.dumps(spec.facts())),
        "seeds": setup.seeds,
        "given": setup.given,
        "prior_rows": setup.prior_rows,
    }


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _prune(folder: Path, setup: RunSetup) -> None:
    """Keeps the last checkpoints and the rows that any of them, or a longer run from them, may need."""
    remove_partial(folder / "checkpoints")
    remove_partial(folder / "replay")
    num_kept = setup.config.loop.keep_checkpoints
    kept = steps_kept(folder)[-num_kept:]
    if not kept:  # somebody has moved the folder while this was written
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    for step in steps_kept(folder)[:-num_kept]:
        shutil.rmtree(existing_folder(folder / "checkpoints" / str(step)), ignore_errors=True)
    oldest = setup.prior_rows + kept[0] // setup.spec.action_repeat
    most = largest_capacity(setup.config, setup.spec.time_limit, setup.prior_rows)
    replay_files.forget(folder / "replay", oldest - most)
