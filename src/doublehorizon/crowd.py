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
from pathlib import Path
from typing import Any

from doublehorizon import jobs as work
from doublehorizon.board import Board
from doublehorizon.durable import write_file
from doublehorizon.errors import RunError, UserError
from doublehorizon.jobs import Job

Files = dict[str, bytes]
"""Contents by path, inside a run folder."""

_MOST_LOSSES = 20  # of a job's nodes, after which it is given up


def run_here(jobs: list[Job], root: Path, board: Board) -> dict[str, str]:
    """One after another. What went wrong, by the job's name; a job that fails does not keep the others waiting."""
    problems = {}
    for job in jobs:
        board.tell(job.name, "running")
        folder = root / job.name
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile() as log:
            process = work.start(job, folder, log)
            try:
                while process.poll() is None:
                    time.sleep(0.2)
                    board.look()
            except BaseException:
                _stop(process)
                raise
            _settle(job, process.returncode, work.last_words(log), board, problems)
    return problems


def _stop(process: subprocess.Popen) -> None:
    """Lets it save what it has; Ctrl-C has reached it too."""
    process.terminate()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _settle(job: Job, status: int, words: str, board: Board, problems: dict[str, str]) -> None:
    if status == 0:
        board.tell(job.name, "done")
        return
    problems[job.name] = words
    board.tell(job.name, "failed", words)


@dataclass(frozen=True)
class Share:
    """What a job asks of a cluster. None: a GPU if there is one, and a core per seed as far as a node has them."""

    gpus: float | None = None
    cores: float | None = None


def run_on_ray(jobs: list[Job], root: Path, board: Board, address: str | None, share: Share) -> dict[str, str]:
    """All at once, as far as the cluster has room."""
    ray = _import_ray()
    begun_here = not ray.is_initialized()
    if begun_here:
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False, include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as problem:
            raise UserError(f"the Ray cluster at {address!r} cannot be reached: {problem}.") from problem
    try:
        return _Ray(ray, root, board, share).run(jobs)
    finally:
        if begun_here:
            ray.shutdown()


class _Ray:
    """Submits jobs, writes down what they send, and submits them again if their node is lost."""

    def __init__(self, ray: Any, root: Path, board: Board, share: Share):
        from ray.util.queue import Queue  # type: ignore[import-not-found]
        from ray.util.scheduling_strategies import (  # type: ignore[import-not-found]
            NodeAffinitySchedulingStrategy,
        )

        self._ray, self._root, self._board, self._share = ray, root, board, share
        # it takes no core, and lives where the answers are read: a lost node must not take it along. As a wish
        # (`soft`) it is not enough: Ray then puts it elsewhere if it starts sooner there
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._mail = Queue(maxsize=64, actor_options={"num_cpus": 0, "scheduling_strategy": here})
        self._losses: dict[str, int] = {}

    def run(self, jobs: list[Job]) -> dict[str, str]:
        problems: dict[str, str] = {}
        self._share = settled(self._share, max((job.seeds for job in jobs), default=1), self._ray.nodes())
        waiting = {self._submit(job): job for job in jobs}
        while waiting:
            done, _ = self._ray.wait(list(waiting), timeout=0.2)
            self._read_mail()
            for answer in done:
                job = waiting.pop(answer)
                if (again := self._receive(answer, job, problems)) is not None:
                    waiting[again] = job
            self._board.look()
        self._mail.shutdown(force=True)
        return problems

    def _submit(self, job: Job) -> Any:
        asked = {"num_gpus": self._share.gpus, "num_cpus": self._share.cores}
        task = self._ray.remote(max_retries=0, **asked)(_remote)
        return task.remote(job.text(), self._share, read_files(self._root / job.name, {}), self._mail)

    def _receive(self, answer: Any, job: Job, problems: dict[str, str]) -> Any:
        """What became of a job; if it was lost, its next answer."""
        exceptions = self._ray.exceptions
        try:
            status, words = self._ray.get(answer)
        except (
            exceptions.WorkerCrashedError,
            exceptions.NodeDiedError,
            exceptions.ObjectLostError,
            exceptions.OutOfMemoryError,
        ) as problem:
            self._losses[job.name] = self._losses.get(job.name, 0) + 1
            if self._losses[job.name] <= _MOST_LOSSES:
                self._board.tell(job.name, "waiting", "its node was lost; it goes on from its last checkpoint")
                return self._submit(job)
            status, words = 1, f"lost {_MOST_LOSSES} times: {problem}"
        except exceptions.RayError as problem:
            status, words = 1, str(problem).strip().splitlines()[-1]
        self._read_mail()
        _settle(job, status, words, self._board, problems)
        return None

    def _read_mail(self) -> None:
        while self._mail.qsize():
            name, where, changed, gone = self._mail.get()
            if self._board.rows[name].state != "running" or self._board.rows[name].note != where:
                self._board.tell(name, "running", where)
            write_files(self._root / name, changed, gone)


def settled(share: Share, seeds: int, nodes: list[dict[str, Any]]) -> Share:
    """What each job asks for, decided once: some node must be able to give all of it."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = share.gpus
    if gpus is None:
        gpus = float(any(node.get("GPU", 0.0) >= 1 for node in alive))
    fit = [node.get("CPU", 0.0) for node in alive if node.get("GPU", 0.0) >= gpus]
    cores = max(1.0, min(float(seeds), max(fit, default=1.0))) if share.cores is None else share.cores
    if not any(most >= cores for most in fit):
        offers = ", ".join(f"{node.get('CPU', 0):g} cores and {node.get('GPU', 0):g} GPUs" for node in alive)
        raise UserError(
            f"each run asks for {cores:g} core(s) and {gpus:g} GPU(s), but no node of the cluster has them. Nodes: "
            f"{offers or 'none'}. Ask for less with --cores and --gpus."
        )
    return Share(gpus, cores)


def _remote(text: str, share: Share, files: Files, mail: Any) -> tuple[int, str]:
    """A job on some node: in a folder of its own, whose changes are sent."""
    job = work.read_job(text)
    if 0 < (share.gpus or 0) < 1:  # it is not alone on its GPU, of which JAX would take most
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 * (share.gpus or 0):.2f}"
    with tempfile.TemporaryDirectory(prefix="doublehorizon-") as scratch, tempfile.TemporaryFile() as log:
        folder = Path(scratch) / "run"
        write_files(folder, files, set())
        known: dict[str, tuple[int, int]] = {}
        read_files(folder, known)  # which the other side has

        def send() -> None:
            before = set(known)
            changed = read_files(folder, known)
            if changed or before - set(known):
                mail.put((job.name, f"on {os.uname().nodename}", changed, before - set(known)))

        process = work.start(job, folder, log)
        try:
            _watch(process, send)
        finally:
            if process.poll() is None:
                _stop(process)
        send()
        return process.returncode, work.last_words(log)


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
                found[name] = path.read_bytes()
        except OSError:  # it has been replaced or removed meanwhile
            present.pop(name, None)
    known.clear()
    known.update(present)
    return found


def write_files(folder: Path, changed: Files, gone: set[str]) -> None:
    """Does to a folder what has happened to another one: writes what has changed, then removes what is gone there.
    What somebody else has put into it stays."""
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


def failed(problems: dict[str, str], total: int) -> RunError:
    """What to say where some jobs have failed."""
    lines = [f"{name}: {words}" for name, words in problems.items()]
    return RunError(f"{len(lines)} of {total} run(s) failed.\n" + "\n".join(lines))
