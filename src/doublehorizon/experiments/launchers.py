"""Where jobs run: on this machine one after another, or all over a Ray cluster, whose nodes may come and go.

On a cluster nothing is shared but messages: a job runs in a folder of its node and sends its new files, checkpoints
among them, to whoever asked for it. If the node is lost, the job begins elsewhere from the last files that came.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from doublehorizon.atomic_files import MOST_ARRAYS, read_file, write_file
from doublehorizon.errors import RunError, UserError
from doublehorizon.experiments import jobs as work
from doublehorizon.experiments.experiment_view import ExperimentView
from doublehorizon.experiments.jobs import Job

Files = dict[str, bytes]
"""Contents by path, inside a run folder."""

_MOST_LOSSES = 20  # of a job's nodes, after which it is given up


def run_locally(jobs: list[Job], root: Path, view: ExperimentView) -> dict[str, str]:
    """One after another. What went wrong, by the job's name; a job that fails does not keep the others waiting."""
    problems = {}
    for job in jobs:
        view.update(job.name, "running")
        folder = root / job.name
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile() as log:
            process = work.start(job, folder, log)
            try:
                while process.poll() is None:
                    time.sleep(0.2)
                    view.refresh()
            except BaseException:
                stop(process)
                raise
            _report_end(job, process.returncode, work.last_line(log), view, problems)
    return problems


def stop(process: subprocess.Popen) -> None:
    """Lets it save what it has; Ctrl-C has reached it too."""
    process.terminate()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _report_end(job: Job, status: int, reason: str, view: ExperimentView, problems: dict[str, str]) -> None:
    if status == 0:
        view.update(job.name, "done")
        return
    problems[job.name] = reason
    view.update(job.name, "failed", reason)


@dataclass(frozen=True)
class Resources:
    """What a job asks of a cluster. None: a GPU if there is one, and a core per seed as far as a node has them."""

    gpus: float | None = None
    cores: float | None = None


def run_on_ray(
    jobs: list[Job], root: Path, view: ExperimentView, address: str | None, resources: Resources
) -> dict[str, str]:
    """All at once, as far as the cluster has room."""
    ray = _import_ray()
    begun_here = not ray.is_initialized()
    if begun_here:
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False, include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as problem:
            raise UserError(f"the Ray cluster at {address!r} cannot be reached: {problem}.") from problem
    try:
        return _Ray(ray, root, view, resources).run(jobs)
    finally:
        if begun_here:
            ray.shutdown()


class _Ray:
    """Submits jobs, writes down what they send, and submits them again if their node is lost."""

    def __init__(self, ray: Any, root: Path, view: ExperimentView, resources: Resources):
        from ray.util.queue import Queue  # type: ignore[import-not-found]
        from ray.util.scheduling_strategies import (  # type: ignore[import-not-found]
            NodeAffinitySchedulingStrategy,
        )

        self._ray, self._root, self._view, self._resources = ray, root, view, resources
        # it takes no core, and lives where the answers are read: a lost node must not take it along. As a wish
        # (`soft`) it is not enough: Ray then puts it elsewhere if it starts sooner there
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._queue = Queue(maxsize=64, actor_options={"num_cpus": 0, "scheduling_strategy": here})
        self._losses: dict[str, int] = {}

    def run(self, jobs: list[Job]) -> dict[str, str]:
        problems: dict[str, str] = {}
        self._resources = decided(self._resources, max((job.seeds for job in jobs), default=1), self._ray.nodes())
        waiting = {self._submit(job): job for job in jobs}
        while waiting:
            done, _ = self._ray.wait(list(waiting), timeout=0.2)
            self._read_queue()
            for answer in done:
                job = waiting.pop(answer)
                if (again := self._receive(answer, job, problems)) is not None:
                    waiting[again] = job
            self._view.refresh()
        self._queue.shutdown(force=True)
        return problems

    def _submit(self, job: Job) -> Any:
        asked = {"num_gpus": self._resources.gpus, "num_cpus": self._resources.cores}
        task = self._ray.remote(max_retries=0, **asked)(_remote)
        return task.remote(job.text(), self._resources, read_files(self._root / job.name, {}), self._queue)

    def _receive(self, answer: Any, job: Job, problems: dict[str, str]) -> Any:
        """What became of a job; if it was lost, its next answer."""
        exceptions = self._ray.exceptions
        try:
            status, reason = self._ray.get(answer)
        except (
            exceptions.WorkerCrashedError,
            exceptions.NodeDiedError,
            exceptions.ObjectLostError,
            exceptions.OutOfMemoryError,
        ) as problem:
            self._losses[job.name] = self._losses.get(job.name, 0) + 1
            if self._losses[job.name] <= _MOST_LOSSES:
                self._view.update(job.name, "waiting", "its node was lost; it goes on from its last checkpoint")
                return self._submit(job)
            status, reason = 1, f"lost {_MOST_LOSSES} times: {problem}"
        except exceptions.RayError as problem:
            status, reason = 1, str(problem).strip().splitlines()[-1]
        self._read_queue()
        _report_end(job, status, reason, self._view, problems)
        return None

    def _read_queue(self) -> None:
        while self._queue.qsize():
            name, where, changed, gone = self._queue.get()
            if self._view.rows[name].state != "running" or self._view.rows[name].note != where:
                self._view.update(name, "running", where)
            write_files(self._root / name, changed, gone)


def decided(resources: Resources, seeds: int, nodes: list[dict[str, Any]]) -> Resources:
    """What each job asks for, decided once: some node must be able to give all of it."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = resources.gpus
    if gpus is None:
        gpus = float(any(node.get("GPU", 0.0) >= 1 for node in alive))
    fit = [node.get("CPU", 0.0) for node in alive if node.get("GPU", 0.0) >= gpus]
    cores = max(1.0, min(float(seeds), max(fit, default=1.0))) if resources.cores is None else resources.cores
    if not any(most >= cores for most in fit):
        offers = ", ".join(f"{node.get('CPU', 0):g} cores and {node.get('GPU', 0):g} GPUs" for node in alive)
        raise UserError(
            f"each run asks for {cores:g} core(s) and {gpus:g} GPU(s), but no node of the cluster has them. Nodes: "
            f"{offers or 'none'}. Ask for less with --cores and --gpus."
        )
    return Resources(gpus, cores)


def _remote(text: str, resources: Resources, files: Files, queue: Any) -> tuple[int, str]:
    """A job on some node: in a folder of its own, whose changes are sent."""
    job = work.read_job(text)
    if 0 < (resources.gpus or 0) < 1:  # it is not alone on its GPU, of which JAX would take most
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 * (resources.gpus or 0):.2f}"
    with tempfile.TemporaryDirectory(prefix="doublehorizon-") as scratch, tempfile.TemporaryFile() as log:
        folder = Path(scratch) / "run"
        write_files(folder, files, set())
        known: dict[str, tuple[int, int]] = {}
        read_files(folder, known)  # which the other side has

        def send() -> None:
            before = set(known)
            changed = read_files(folder, known)
            if changed or before - set(known):
                queue.put((job.name, f"on {os.uname().nodename}", changed, before - set(known)))

        process = work.start(job, folder, log)
        try:
            _watch(process, send)
        finally:
            if process.poll() is None:
                stop(process)
        send()
        return process.returncode, work.last_line(log)


def _watch(process: subprocess.Popen, send: Callable[[], None]) -> None:
    while process.poll() is None:
        time.sleep(0.5)
        send()


def read_files(folder: Path, known: dict[str, tuple[int, int]]) -> Files:
    """Files that are new or have changed since they were `known`, by time and size, which is brought up to date. What
    is being written is left for the next time."""
    found: Files = {}
    present = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        name = str(path.relative_to(folder))
        if path.name == ".lock" or ".partial" in name or not path.is_file():
            continue
        try:
            facts = path.stat()
            present[name] = (facts.st_mtime_ns, facts.st_size)
            if known.get(name) != present[name]:
                found[name] = read_file(path, MOST_ARRAYS)
        except OSError:  # it has been replaced or removed meanwhile
            present.pop(name, None)
    known.clear()
    known.update(present)
    return found


def write_files(folder: Path, changed: Files, gone: set[str]) -> None:
    """Does to a folder what has happened to another one: writes what has changed, then removes what is gone there.
    What somebody else has put into it stays."""
    for name in (*changed, *gone):  # they come from another machine
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise RunError(f"a file of the name {name!r} was sent, which is not inside a run folder")
    for name, content in changed.items():
        write_file(folder / name, content)
    for name in gone:
        (folder / name).unlink(missing_ok=True)
        parent = (folder / name).parent
        if parent != folder and parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()


def _import_ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found]
    except ImportError as problem:
        raise UserError("a Ray cluster needs a package: pip install 'doublehorizon[ray]'.") from problem
    return ray


def failure(problems: dict[str, str], total: int) -> RunError:
    """What to say where some jobs have failed."""
    lines = [f"{name}: {reason}" for name, reason in problems.items()]
    return RunError(f"{len(lines)} of {total} run(s) failed.\n" + "\n".join(lines))
