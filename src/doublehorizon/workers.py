"""Processes that collect experience and evaluate policies, with NumPy and the simulator alone.

A worker is started as `python -m doublehorizon.workers` and never imports JAX. It serves several seeds, each with its
own environment and generators, so a seed's experience does not depend on how many workers there are.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TextIO

import cloudpickle
import numpy as np

from doublehorizon.errors import RunError, UserError
from doublehorizon.policy import NumpyPolicy
from doublehorizon.seats import Batch, Episode, Harvest, Recipe, Room, SeatId, Watch

_MOST_RESTARTS = 3


class Crew:
    """Collecting and evaluating workers for all seeds of a run. Use it as a context manager.

    An environment object (rather than a way to make one) cannot be sent to another process: give a recipe whose
    `make_env` returns it and `in_process=True`, for one seed; an evaluation then ends the episode that was being
    collected. `episodes` are those that were running when an earlier crew was dismissed: they go on.
    """

    def __init__(
        self,
        recipe: Recipe,
        seeds: list[int],
        num_envs: int = 1,
        in_process: bool = False,
        episodes: dict[SeatId, Episode] | None = None,
    ):
        self.seeds, self.notes, self._in_process = seeds, [], in_process
        self.episodes = dict(episodes or {})
        """The episodes that are running between two calls of `collect`."""
        # workers only step; a user's rule may hold on to anything
        recipe = replace(recipe, spec=replace(recipe.spec, terminates=None))
        self._seats = [(seed, place) for seed in seeds for place in range(num_envs)]
        self._collectors: list[_LocalWorker] | list[_RemoteWorker]
        self._evaluators: list[_LocalWorker] | list[_RemoteWorker]
        if in_process:
            room = Room(recipe)
            self._collectors, self._evaluators = [_LocalWorker(room, self._seats)], [_LocalWorker(room, self._seats)]
        else:
            self._collectors, self._evaluators = [], []
            with ExitStack() as on_failure:  # whatever was started is closed again if the next one cannot be
                on_failure.callback(self.close)
                self._hire(recipe, self._collectors, self._evaluators)
                on_failure.pop_all()
        self._queues: list[deque[tuple[int, dict[SeatId, tuple]]]] = [deque() for _ in self._evaluators]

    def _hire(self, recipe: Recipe, collectors: list, evaluators: list) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        testers = [(seed, 0) for seed in self.seeds]
        pickled = _pickled(recipe)
        for group, seats, most in ((collectors, self._seats, cores), (evaluators, testers, max(1, cores // 2))):
            size = min(len(seats), most)
            for i in range(size):
                group.append(_RemoteWorker(seats[i::size], recipe, pickled, self.notes))
        for worker in (*collectors, *evaluators):  # all have been started: they start side by side
            worker.brief()

    def collect(self, policies: list[NumpyPolicy] | None, num_steps: int, step: int = 0) -> Batch:
        """Steps of every seed, `[seed, step, ...]`, from all of its environments together; without policies, with the
        seed policy or uniform actions. `step` is where the run stands."""
        by_seed = dict(zip(self.seeds, policies or [None] * len(self.seeds), strict=True))
        num_envs = len(self._seats) // len(self.seeds)
        shares = [num_steps // num_envs + (place < num_steps % num_envs) for place in range(num_envs)]
        for worker in self._collectors:
            jobs = {at: (step, by_seed[at[0]], shares[at[1]], self.episodes.get(at)) for at in worker.seats}
            worker.send("collect", jobs)
        found: dict[SeatId, Harvest] = {}
        for worker in self._collectors:
            found |= worker.receive()
        self.episodes = {at: harvest.episode for at, harvest in found.items() if harvest.episode is not None}
        for seed in dict.fromkeys(seed for (seed, _), harvest in found.items() if not harvest.exact):
            self.notes.append(
                f"seed {seed}: the environment does not repeat itself, so its running episode was given up and a new "
                "one begun; the run is not exactly what it would have been"
            )

        def joined(seed: int, name: str) -> np.ndarray:
            return np.concatenate([found[seed, place].batch[name] for place in range(num_envs)])

        return {name: np.stack([joined(seed, name) for seed in self.seeds]) for name in found[self._seats[0]].batch}

    def start_evaluation(self, policies: list[NumpyPolicy] | None, step: int, num_episodes: int) -> None:
        """Queues test episodes of every seed; `finished_evaluations` brings the results."""
        by_seed = dict(zip(self.seeds, policies or [None] * len(self.seeds), strict=True))
        for worker, queue in zip(self._evaluators, self._queues, strict=True):
            queue.append((step, {at: (step, by_seed[at[0]], num_episodes) for at in worker.seats}))
            if len(queue) == 1:
                worker.send("evaluate", queue[0][1])
        if self._in_process:
            self.episodes = {}

    def finished_evaluations(self, block: bool = False) -> list[tuple[int, int, float]]:
        """(step, seed, mean return) of each evaluation that is done; with `block`, of all that were started."""
        done = []
        for worker, queue in zip(self._evaluators, self._queues, strict=True):
            while queue and (block or worker.ready()):
                step, _ = queue.popleft()
                done += [(step, seed, value) for (seed, _), value in worker.receive().items()]
                if queue:  # a busy worker does not read its pipe, so it is sent one job at a time
                    worker.send("evaluate", queue[0][1])
        return done

    def ask(self, call: str, jobs: dict[SeatId, tuple]) -> dict[SeatId, Any]:
        """What some seats answer to a call of theirs, each with its own arguments, side by side."""
        asked = [(worker, {at: jobs[at] for at in worker.seats if at in jobs}) for worker in self._collectors]
        asked = [(worker, mine) for worker, mine in asked if mine]
        for worker, mine in asked:
            worker.send(call, mine)
        found: dict[SeatId, Any] = {}
        for worker, _ in asked:
            found |= worker.receive()
        return found

    def pop_notes(self) -> list[str]:
        """What the user should know of, since the last call."""
        notes = list(self.notes)
        self.notes.clear()
        return notes

    def close(self) -> None:
        workers = (*self._collectors, *self._evaluators)
        for worker in workers:
            worker.dismiss()
        deadline = time.monotonic() + 5.0
        for worker in workers:
            worker.await_end(deadline)

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _LocalWorker:
    """A worker without a process: the environment stays where the user made it."""

    def __init__(self, room: Room, seats: list[SeatId]):
        self.seats = seats
        self._room = room
        self._answers: list[dict[SeatId, Any]] = []

    def send(self, call: str, arguments: dict[SeatId, tuple]) -> None:
        self._answers.append(self._room.answer(call, arguments))

    def ready(self) -> bool:
        return bool(self._answers)

    def receive(self) -> dict[SeatId, Any]:
        return self._answers.pop(0)

    def dismiss(self) -> None:
        self._answers.clear()

    def await_end(self, deadline: float) -> None:
        """There is no process to wait for."""


class _RemoteWorker:
    """A worker process and the pipe to it. If the process dies, another takes over its job from the beginning; what a
    seat does depends on its job alone, so nothing else is lost. It is replaced a few times in a row at most."""

    def __init__(self, seats: list[SeatId], recipe: Recipe, pickled: bytes, notes: list[str]):
        self.seats, self._name, self._timeout = seats, recipe.spec.name, recipe.step_timeout
        self._pickled, self._notes = pickled, notes
        self._job: tuple[str, dict[SeatId, tuple]] | None = None
        self._heard: tuple[str, Any] | None = None
        self._restarts = 0
        self._start()

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        # where a worker that is stuck says so; it has a name for those systems that need one
        self._last_words = tempfile.NamedTemporaryFile("w+", prefix="doublehorizon-worker-")  # noqa: SIM115
        log = self._last_words.name
        one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        self._process = subprocess.Popen(
            # -P: what lies in the working directory is not imported unless the run itself does so
            [sys.executable, "-P", "-m", "doublehorizon.workers", *map(str, (theirs.fileno(), os.getpid())), log],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what an environment prints must not mix with a command's own output
            env=os.environ | one_thread | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )
        theirs.close()

    def brief(self) -> None:
        """Tells the process what to work on; it may be waited for until it has started."""
        try:
            self._pipe.send_bytes(self._pickled)
        except OSError:
            self._replace()

    def send(self, call: str, arguments: dict[SeatId, tuple]) -> None:
        self._job = (call, arguments)
        try:
            self._pipe.send(self._job)
        except OSError:
            self._replace()

    def ready(self) -> bool:
        """Whether the answer is there. A process that died is replaced, but its successor is not waited for."""
        if self._heard is None and wait([self._pipe], timeout=0):
            self._listen()
        return self._heard is not None

    def receive(self) -> dict[SeatId, Any]:
        while self._heard is None:
            self._listen()
        (kind, answer), self._heard = self._heard, None
        if kind == "mistake":
            raise UserError(answer)
        if kind == "failure":
            raise RunError(answer)
        self._job, self._restarts = None, 0
        return answer

    def _listen(self) -> None:
        try:
            self._heard = self._pipe.recv()
        except (EOFError, OSError):
            self._replace()

    def dismiss(self) -> None:
        self._pipe.close()  # the worker reads the end of its pipe and leaves

    def await_end(self, deadline: float) -> None:
        """Waits until the deadline for the process to leave by itself."""
        try:
            self._process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._last_words.close()

    def _replace(self) -> None:
        """Another process for one that died, which begins its job anew; too many in a row are a `RunError`."""
        problem = self._death()
        if self._restarts == _MOST_RESTARTS:
            raise RunError(f"{problem} It was restarted {_MOST_RESTARTS} times before.")
        self._restarts += 1
        self._notes.append(f"{problem} It is restarted and does its work again.")
        self.dismiss()
        self.await_end(time.monotonic())
        self._start()
        try:
            self._pipe.send_bytes(self._pickled)
            if self._job is not None:
                self._pipe.send(self._job)
        except OSError:
            self._replace()

    def _death(self) -> str:
        """What can be told of a process that died. One that was stuck would be again: that is a `RunError`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)  # so that its status can be told
        self._last_words.seek(0)
        at, _, stuck = self._last_words.read().partition("\n")
        seed, step = at.split() if at else (self.seats[0][0], "0")
        if stuck:
            raise RunError(
                f"{self._name} did not come back within {self._timeout:g} s (seed {seed}, about step {step}). It was "
                f"stuck here:\n{stuck}If it needs longer, raise loop.step_timeout."
            )
        status = self._process.poll()
        how = f"killed by signal {-status}" if status is not None and status < 0 else f"status {status}"
        seeds = ", ".join(str(seed) for seed in dict.fromkeys(seed for seed, _ in self.seats))
        return f"the worker process of {self._name} died ({how}; seed(s) {seeds}, about step {step})."


def _pickled(recipe: Recipe) -> bytes:
    try:
        return cloudpickle.dumps(recipe)
    except Exception as problem:  # whatever a user's object raises when it is pickled
        raise UserError(
            f"the function that makes {recipe.spec.name}, or the policy for its random steps, cannot be sent to worker "
            f"processes: {problem!r}. Let it build the environment from plain values, or pass an environment object "
            "for one seed."
        ) from problem


def serve(pipe: Connection, last_words: TextIO) -> None:
    """The worker's life: answers calls until the pipe closes."""
    recipe = cloudpickle.loads(pipe.recv_bytes())
    room = Room(recipe, Watch(recipe.step_timeout, last_words))
    try:
        _answer_calls(pipe, room)
    finally:
        room.close()


def _answer_calls(pipe: Connection, room: Room) -> None:
    while True:
        try:
            call, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = ("answer", room.answer(call, arguments))
        except UserError as problem:
            answer = ("mistake", str(problem))
        except RunError as problem:
            answer = ("failure", str(problem))
        except Exception:
            answer = ("failure", traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:
            return


def _leave_with(parent: int) -> None:
    """Ends this process soon after its parent, however that ended: even in the middle of a long episode."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_leave_with, args=(int(sys.argv[2]),), daemon=True).start()
    with open(sys.argv[3], "w") as last_words:
        serve(Connection(int(sys.argv[1])), last_words)
