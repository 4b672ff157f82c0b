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
from doublehorizon.seats import Batch, Recipe, Room, SeatId, Watch


class Crew:
    """Collecting and evaluating workers for all seeds of a run. Use it as a context manager.

    An environment object (rather than a way to make one) cannot be sent to another process: give a recipe whose
    `make_env` returns it and `in_process=True`, for one seed; an evaluation then ends the episode that was being
    collected.
    """

    def __init__(self, recipe: Recipe, seeds: list[int], num_envs: int = 1, in_process: bool = False):
        self.seeds = seeds
        # workers only step; a user's rule may hold on to anything
        recipe = replace(recipe, spec=replace(recipe.spec, terminates=None))
        self._seats = [(seed, place) for seed in seeds for place in range(num_envs)]
        if in_process:
            room = Room(recipe)
            self._collectors, self._evaluators = [_LocalWorker(room, self._seats)], [_LocalWorker(room, self._seats)]
        else:
            pickled = _pickled(recipe)
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            testers = [(seed, 0) for seed in seeds]
            self._collectors, self._evaluators = [], []
            with ExitStack() as on_failure:  # whatever was started is closed again if the next one cannot be
                on_failure.callback(self.close)
                for group, seats, most in (
                    (self._collectors, self._seats, cores),
                    (self._evaluators, testers, max(1, cores // 2)),
                ):
                    size = min(len(seats), most)
                    for i in range(size):
                        group.append(_RemoteWorker(seats[i::size], recipe))
                for worker in (*self._collectors, *self._evaluators):  # all have been started: they start side by side
                    worker.brief(pickled)
                on_failure.pop_all()
        self._queues: list[deque[tuple[int, dict[SeatId, tuple]]]] = [deque() for _ in self._evaluators]

    def collect(self, policies: list[NumpyPolicy] | None, num_steps: int, step: int = 0) -> Batch:
        """Steps of every seed, `[seed, step, ...]`, from all of its environments together; without policies, with the
        seed policy or uniform actions. `step` is where the run stands."""
        by_seed = dict(zip(self.seeds, policies or [None] * len(self.seeds), strict=True))
        num_envs = len(self._seats) // len(self.seeds)
        shares = [num_steps // num_envs + (place < num_steps % num_envs) for place in range(num_envs)]
        for worker in self._collectors:
            worker.send("collect", {at: (by_seed[at[0]], step, shares[at[1]]) for at in worker.seats})
        found: dict[SeatId, Batch] = {}
        for worker in self._collectors:
            found |= worker.receive()

        def joined(seed: int, name: str) -> np.ndarray:
            return np.concatenate([found[seed, place][name] for place in range(num_envs)])

        return {name: np.stack([joined(seed, name) for seed in self.seeds]) for name in found[self._seats[0]]}

    def start_evaluation(self, policies: list[NumpyPolicy] | None, step: int, num_episodes: int) -> None:
        """Queues test episodes of every seed; `finished_evaluations` brings the results."""
        by_seed = dict(zip(self.seeds, policies or [None] * len(self.seeds), strict=True))
        for worker, queue in zip(self._evaluators, self._queues, strict=True):
            queue.append((step, {at: (by_seed[at[0]], step, num_episodes) for at in worker.seats}))
            if len(queue) == 1:
                worker.send("evaluate", queue[0][1])

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
    """A worker process and the pipe to it."""

    def __init__(self, seats: list[SeatId], recipe: Recipe):
        self.seats, self._name, self._timeout = seats, recipe.spec.name, recipe.step_timeout
        self._pipe, theirs = Pipe()
        # where a worker that is stuck says so; it has a name for those systems that need one
        self._last_words = tempfile.NamedTemporaryFile("w+", prefix="doublehorizon-worker-")  # noqa: SIM115
        one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "doublehorizon.workers", str(theirs.fileno()), self._last_words.name],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what an environment prints must not mix with a command's own output
            env=os.environ | one_thread | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )
        theirs.close()

    def brief(self, pickled: bytes) -> None:
        """Tells the process what to work on; it may be waited for until it has started."""
        try:
            self._pipe.send_bytes(pickled)
        except OSError as problem:
            raise self._lost() from problem

    def send(self, call: str, arguments: dict[SeatId, tuple]) -> None:
        try:
            self._pipe.send((call, arguments))
        except OSError as problem:
            raise self._lost() from problem

    def ready(self) -> bool:
        return bool(wait([self._pipe], timeout=0))

    def receive(self) -> dict[SeatId, Any]:
        try:
            kind, answer = self._pipe.recv()
        except (EOFError, OSError) as problem:
            raise self._lost() from problem
        if kind == "mistake":
            raise UserError(answer)
        if kind == "failure":
            raise RunError(answer)
        return answer

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

    def _lost(self) -> RunError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)  # so that its status can be told
        self._last_words.seek(0)
        at, _, stuck = self._last_words.read().partition("\n")
        seed, step = at.split() if at else (self.seats[0][0], "0")
        if stuck:
            return RunError(
                f"{self._name} did not come back within {self._timeout:g} s (seed {seed}, about step {step}). It was "
                f"stuck here:\n{stuck}If it needs longer, raise loop.step_timeout."
            )
        status = self._process.poll()
        how = f"killed by signal {-status}" if status is not None and status < 0 else f"status {status}"
        seeds = ", ".join(str(seed) for seed in dict.fromkeys(seed for seed, _ in self.seats))
        return RunError(f"the worker process of {self._name} died ({how}; seed(s) {seeds}, about step {step}).")


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
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    with open(sys.argv[2], "w") as last_words:
        serve(Connection(int(sys.argv[1])), last_words)
