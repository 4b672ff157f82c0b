"""Processes that collect experience and evaluate policies, with NumPy and the simulator alone.

A worker is started as `python -m doublehorizon.acting.workers` and never imports JAX. It serves several seeds, each
with its own environment and generators, so a seed's experience does not depend on how many workers there are.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TextIO

import cloudpickle
import numpy as np

from doublehorizon.acting.env_runner import (
    Batch,
    Collected,
    Episode,
    RunnerGroup,
    RunnerId,
    Watchdog,
    WorkerSpec,
    stuck_at,
)
from doublehorizon.acting.policy import NumpyPolicy
from doublehorizon.errors import RunError, UserError
from doublehorizon.signals import unstoppable, when_orphaned

_MOST_RESTARTS = 3
_LOOK_EVERY = 0.5  # seconds, at a process whose reply is awaited


class WorkerPool:
    """Collecting and evaluating workers for all seeds of a run. Use it as a context manager.

    An environment object (rather than a way to make one) cannot be sent to another process: give a spec whose
    `make_env` returns it and `runners`, which step it in this process, for one seed; an evaluation then ends the
    episode that was being collected. `episodes` are those that were running when an earlier pool was closed: `restore`
    continues them. `ahead` are steps that were made already.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        seeds: list[int],
        num_envs: int = 1,
        runners: RunnerGroup | None = None,
        episodes: dict[RunnerId, Episode] | None = None,
        ahead: Batch | None = None,
        evaluation_episodes: int = 0,
    ):
        self.seeds, self.notes, self._runners = seeds, [], runners
        self.evaluation_episodes = evaluation_episodes
        self.ahead = ahead
        """Steps that were made already, `[seed, step, ...]`, and that the next call of `collect` begins with."""
        self._handed: list[tuple[int, Batch]] = []
        self.episodes = dict(episodes or {})
        """The episodes that are running between two calls of `collect`."""
        self.ended: dict[int, list[tuple[float, int]]] = {seed: [] for seed in seeds}
        """Return and length of each seed's episodes that ended in the last call."""
        self.longest_cut = 0
        """Steps of the longest episode that was truncated in the last call; 0 where none was."""
        self.longest = 0
        """Steps of the longest episode of the last call, running ones included."""
        # workers only step; a user's rule may hold on to anything
        spec = replace(spec, spec=replace(spec.spec, terminates=None))
        self._runner_ids = [(seed, env_index) for seed in seeds for env_index in range(num_envs)]
        self._collectors: list[_LocalWorker] | list[_RemoteWorker]
        self._evaluators: list[_LocalWorker] | list[_RemoteWorker]
        self._replays, self._action_repeat, self._interrupted = spec.replays, spec.spec.action_repeat, False
        if runners is not None:
            self._collectors = [_LocalWorker(runners, self._runner_ids)]
            self._evaluators = [_LocalWorker(runners, self._runner_ids)]
        else:
            self._collectors, self._evaluators = [], []
            with ExitStack() as on_failure:  # whatever was started is closed again if the next one cannot be
                on_failure.callback(self.close)
                self._start_workers(spec, self._collectors, self._evaluators)
                on_failure.pop_all()
        self._queues: list[deque[tuple[int, dict[RunnerId, tuple]]]] = [deque() for _ in self._evaluators]

    def _start_workers(self, spec: WorkerSpec, collectors: list, evaluators: list) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        testers = [(seed, 0) for seed in self.seeds]
        pickled = _pickled(spec)
        for group, ids, most in ((collectors, self._runner_ids, cores), (evaluators, testers, max(1, cores // 2))):
            size = min(len(ids), most)
            for i in range(size):
                group.append(_RemoteWorker(ids[i::size], spec, pickled, self.notes))
        for worker in (*collectors, *evaluators):  # all have been started: they start side by side
            worker.send_spec()

    @property
    def is_single(self) -> bool:
        """Whether there is one environment, in this process, which waits while the agent learns."""
        return self._runners is not None

    def collect(
        self, policies: list[NumpyPolicy] | None, num_steps: int, step: int = 0, then_waits: bool = False
    ) -> Batch:
        """`num_steps` steps of every seed, `[seed, step, ...]`, from all of its environments together; by the seed
        policy or uniform actions where there are no policies yet. `step` is the run's. A single environment that
        `then_waits` is acted on until its episode ends, or paused; steps that are too many stay for the next call."""
        made, ahead = 0 if self.ahead is None else self.ahead["reward"].shape[1], self.ahead
        self.ended, self.longest_cut, self.longest = {seed: [] for seed in self.seeds}, 0, 0
        if made < num_steps:
            wait = then_waits and self.is_single
            found = self._collect(policies, num_steps - made, step + made * self._action_repeat, wait)
            found = found if ahead is None else _joined([ahead, found])
        else:
            found = ahead or {}
        now, rest = (
            {name: x[:, part] for name, x in found.items()} for part in (slice(num_steps), slice(num_steps, None))
        )
        with unstoppable():  # see `unkept`
            self._handed.append((step, now))
            self.ahead = rest if rest["reward"].size > 0 else None
            self._interrupted = False
        if then_waits and self._runners is not None:
            self._runners.hold()
        return now

    def begin(self) -> None:
        """What was collected before is kept elsewhere by now; see `unkept`."""
        self._handed = []

    def unkept(self, since: int) -> Batch | None:
        """All steps of a single environment since the run was at the step `since`, those of an interrupted `collect`
        too: nobody should have to make them again. None where there are none, or where they can be made again."""
        if self._runners is None:
            return None
        rows = self._runners.interrupted() if self._interrupted else {}
        parts = [batch for step, batch in self._handed if step >= since]
        parts += [] if self.ahead is None else [self.ahead]
        parts += [{name: x[None] for name, x in batch.items()} for batch in rows.values()]
        joined = _joined(parts) if parts else None
        return joined if joined is not None and joined["reward"].size > 0 else None

    def _collect(self, policies: list[NumpyPolicy] | None, num_steps: int, step: int, to_end: bool) -> Batch:
        by_seed = dict(zip(self.seeds, policies or [None] * len(self.seeds), strict=True))
        num_envs = len(self._runner_ids) // len(self.seeds)
        shares = [num_steps // num_envs + (env_index < num_steps % num_envs) for env_index in range(num_envs)]
        if self._runners is not None:
            self._runners.forget()
        self._interrupted = True
        found: dict[RunnerId, Collected] = self.call(
            "collect",
            {at: (step, by_seed[at[0]], shares[at[1]], self.episodes.get(at), to_end) for at in self._runner_ids},
        )
        self.episodes = {at: part.episode for at, part in found.items() if part.episode is not None}
        self.ended = {
            seed: [episode for at, part in found.items() if at[0] == seed for episode in part.ended]
            for seed in self.seeds
        }
        self.longest_cut = max(part.longest_cut for part in found.values())
        self.longest = max(part.longest for part in found.values())
        self._note_new_episodes([seed for (seed, _), part in found.items() if not part.exact])

        def joined(seed: int, name: str) -> np.ndarray:
            return np.concatenate([found[seed, env_index].batch[name] for env_index in range(num_envs)])

        names = found[self._runner_ids[0]].batch
        return {name: np.stack([joined(seed, name) for seed in self.seeds]) for name in names}

    def restore(self, step: int) -> None:
        """Continue the episodes that were running. Where that is impossible, a new one begins, which is noted."""
        found = self.call("restore", {at: (step, episode) for at, episode in self.episodes.items()})
        self._note_new_episodes([seed for (seed, _), continued in found.items() if not continued])
        self.episodes = {at: episode for at, episode in self.episodes.items() if found[at]}

    def _note_new_episodes(self, seeds: list[int]) -> None:
        for seed in dict.fromkeys(seeds):
            why = "its actions are not repeated on this environment"
            if self._replays:
                why = "the environment does not repeat itself, so the run is not exactly what it would have been"
            self.notes.append(f"seed {seed}: the interrupted episode is given up and a new one begins: {why}")

    def start_evaluation(self, policies: list[NumpyPolicy] | None, step: int, num_episodes: int) -> None:
        """Queues test episodes of every seed; `finished_evaluations` brings the results."""
        by_seed = dict(zip(self.seeds, policies or [None] * len(self.seeds), strict=True))
        for worker, queue in zip(self._evaluators, self._queues, strict=True):
            queue.append((step, {at: (step, by_seed[at[0]], num_episodes) for at in worker.runner_ids}))
            if len(queue) == 1:
                worker.send("episode_returns", queue[0][1])
        if self.is_single:
            self.episodes = {}

    def finished_evaluations(self, block: bool = False) -> list[tuple[int, int, list[float]]]:
        """(step, seed, returns of its episodes) of each evaluation that is done; with `block`, of all of them."""
        done = []
        for worker, queue in zip(self._evaluators, self._queues, strict=True):
            while queue and (block or worker.ready()):
                step, _ = queue.popleft()
                done += [(step, seed, returns) for (seed, _), returns in worker.receive().items()]
                if queue:  # a busy worker does not read its pipe, so it is sent one job at a time
                    worker.send("episode_returns", queue[0][1])
        return done

    def call(self, method: str, arguments: dict[RunnerId, tuple]) -> dict[RunnerId, Any]:
        """Calls a method of some collecting runners side by side, each with its own arguments; what they return."""
        shares = [(w, {at: arguments[at] for at in w.runner_ids if at in arguments}) for w in self._collectors]
        busy = [(worker, share) for worker, share in shares if share]
        for worker, share in busy:
            worker.send(method, share)
        found: dict[RunnerId, Any] = {}
        for worker, _ in busy:
            found |= worker.receive()
        return found

    def pop_notes(self) -> list[str]:
        """What the user should know of, since the last call."""
        notes = list(self.notes)
        self.notes.clear()
        return notes

    def close(self) -> None:
        """Ends the workers; those that do not leave by themselves within seconds are killed. A single environment is
        paused, if it can be."""
        with suppress(Exception):  # what ended the run is being reported
            if self._runners is not None:
                self._runners.hold()
        workers = (*self._collectors, *self._evaluators)
        for worker in workers:
            worker.hang_up()
        deadline = time.monotonic() + 5.0
        for worker in workers:
            worker.wait_for_end(deadline)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _LocalWorker:
    """A worker without a process: the environment stays where the user made it."""

    def __init__(self, runners: RunnerGroup, runner_ids: list[RunnerId]):
        self.runner_ids = runner_ids
        self._runners = runners
        self._replies: list[dict[RunnerId, Any]] = []

    def send(self, method: str, arguments: dict[RunnerId, tuple]) -> None:
        self._replies.append(self._runners.call(method, arguments))

    def ready(self) -> bool:
        return bool(self._replies)

    def receive(self) -> dict[RunnerId, Any]:
        return self._replies.pop(0)

    def hang_up(self) -> None:
        self._replies.clear()

    def wait_for_end(self, deadline: float) -> None:
        """There is no process to wait for."""


class _RemoteWorker:
    """A worker process and the pipe to it. If the process dies, another takes over its job from the beginning; what a
    runner does depends on its arguments alone, so nothing else is lost. It is replaced a few times in a row at most."""

    def __init__(self, runner_ids: list[RunnerId], spec: WorkerSpec, pickled: bytes, notes: list[str]):
        self.runner_ids, self._name, self._timeout = runner_ids, spec.spec.name, spec.step_timeout
        self._pickled, self._notes = pickled, notes
        self._job: tuple[str, dict[RunnerId, tuple]] | None = None
        self._reply: tuple[str, Any] | None = None
        self._restarts = 0
        self._start()

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        # of the worker's watchdog; it has no name, so nothing is left of it
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        passed = [theirs.fileno(), self._log.fileno()]
        one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        self._process = subprocess.Popen(
            # -P: what lies in the working directory is not imported unless the run itself does so
            [sys.executable, "-P", "-m", "doublehorizon.acting.workers", str(os.getpid()), *map(str, passed)],
            pass_fds=passed,
            process_group=0,  # what the environment starts can be ended with it
            stdin=subprocess.DEVNULL,
            stdout=2,  # what an environment prints must not mix with a command's own output
            env=os.environ | one_thread | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )
        theirs.close()

    def send_spec(self) -> None:
        """Sends the process what it is to work with; this may wait until it has started."""
        try:
            self._pipe.send_bytes(self._pickled)
        except OSError:
            self._replace()

    def send(self, method: str, arguments: dict[RunnerId, tuple]) -> None:
        self._job = (method, arguments)
        try:
            self._pipe.send(self._job)
        except OSError:
            self._replace()

    def ready(self) -> bool:
        """Whether the reply is there. A process that died is replaced, but its successor is not waited for."""
        if self._reply is None:
            self._look(0.0)
        return self._reply is not None

    def receive(self) -> dict[RunnerId, Any]:
        """The reply, once it is there; what the worker raised is raised here."""
        while self._reply is None:
            self._look(_LOOK_EVERY)
        (kind, value), self._reply = self._reply, None
        if kind == "mistake":
            raise UserError(value)
        if kind == "failure":
            raise RunError(value)
        self._job, self._restarts = None, 0
        return value

    def _look(self, seconds: float) -> None:
        """Take the reply if it comes within `seconds`. Otherwise see whether the process has died, which the pipe does
        not say while a process that the environment started holds the other end, or is stuck."""
        if wait([self._pipe], timeout=seconds):
            self._read()
        elif self._process.poll() is not None:
            self._read() if wait([self._pipe], timeout=0) else self._replace()
        else:
            self._refuse_stuck()

    def _read(self) -> None:
        try:
            self._reply = self._pipe.recv()
        except (EOFError, OSError):
            self._replace()

    def hang_up(self) -> None:
        self._pipe.close()  # the worker reads the end of its pipe and leaves

    def wait_for_end(self, deadline: float) -> None:
        """Waits until the deadline for the process to leave by itself; then ends it, and all that it started."""
        if self._log.closed:  # it has ended before, and its number may be another process's
            return
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=max(0.0, deadline - time.monotonic()))
        with suppress(ProcessLookupError, PermissionError):  # nothing is left of it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _replace(self) -> None:
        """Another process for one that died, which begins its job anew; too many in a row are a `RunError`."""
        problem = self._crash_report()
        self.hang_up()
        self.wait_for_end(time.monotonic())
        if self._restarts == _MOST_RESTARTS:
            raise RunError(f"{problem} It was restarted {_MOST_RESTARTS} times before.")
        self._restarts += 1
        self._notes.append(f"{problem} It is restarted and does its work again.")
        self._start()
        try:
            self._pipe.send_bytes(self._pickled)
            if self._job is not None:
                self._pipe.send(self._job)
        except OSError:
            self._replace()

    def _crash_report(self) -> str:
        """What is known of a process that died."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)  # so that its status is known
        at, _ = self._place()
        status = self._process.poll()
        how = f"killed by signal {-status}" if status is not None and status < 0 else f"status {status}"
        seeds = ", ".join(str(seed) for seed in dict.fromkeys(seed for seed, _ in self.runner_ids))
        return f"the worker process of {self._name} died ({how}; seed(s) {seeds}, about step {at[1]})."

    def _refuse_stuck(self) -> None:
        """Raise a `RunError` if an environment does not come back: in another process it would not either."""
        (seed, step), stuck = self._place()
        if stuck:
            raise RunError(
                f"{self._name} did not come back within {self._timeout:g} s (seed {seed}, about step {step}). It was "
                f"stuck here:\n{stuck}If it needs longer, raise loop.step_timeout."
            )

    def _place(self) -> tuple[tuple[int, int], str]:
        """Seed and step at which the process last was, and where it is stuck, if it is."""
        written = os.pread(self._log.fileno(), 2**20, 0)  # its place in the file is the worker's, too, and stays
        at, stuck = stuck_at(written.decode(errors="replace"))
        return at or (self.runner_ids[0][0], 0), stuck


def _joined(parts: list[Batch]) -> Batch:
    """One after the other along the steps."""
    return {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}


def _pickled(spec: WorkerSpec) -> bytes:
    try:
        return cloudpickle.dumps(spec)
    except Exception as problem:  # whatever a user's object raises when it is pickled
        raise UserError(
            f"the function that makes {spec.spec.name}, or the policy for its random steps, cannot be sent to worker "
            f"processes: {problem!r}. Let it build the environment from plain values, or pass an environment object "
            "for one seed."
        ) from problem


def serve(pipe: Connection, log: TextIO) -> None:
    """The worker's life: answers calls until the pipe closes."""
    spec = cloudpickle.loads(pipe.recv_bytes())
    runners = RunnerGroup(spec, Watchdog(spec.step_timeout, log))
    try:
        _answer_calls(pipe, runners)
    finally:
        runners.close()


def _answer_calls(pipe: Connection, runners: RunnerGroup) -> None:
    while True:
        try:
            method, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            reply = ("answer", runners.call(method, arguments))
        except UserError as problem:
            reply = ("mistake", str(problem))
        except RunError as problem:
            reply = ("failure", str(problem))
        except Exception:
            reply = ("failure", traceback.format_exc())
        try:
            pipe.send(reply)
        except OSError:
            return


def _main(parent: int, pipe: int, log: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # what an environment prints must not stop it
    os.set_inheritable(pipe, False)
    connection = Connection(pipe)
    os.register_at_fork(after_in_child=connection.close)
    when_orphaned(parent, lambda: os.killpg(0, signal.SIGKILL))  # even in the middle of a long episode
    with open(log, "w") as file:
        serve(connection, file)


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
