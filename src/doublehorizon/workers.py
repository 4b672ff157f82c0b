"""Processes that collect experience and evaluate policies, with NumPy and the simulator alone.

A worker is started as `python -m doublehorizon.workers` and never imports JAX. It serves several seeds, each with its
own environment and generators, so a seed's experience does not depend on how many workers there are.
"""

import os
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

from doublehorizon.envs.make import EnvSpec, Simulator
from doublehorizon.errors import RunError, UserError
from doublehorizon.policy import NumpyPolicy

Batch = dict[str, np.ndarray]
"""Transitions of one seed, field by field (the fields of `types.Transition`)."""

_COLLECT, _EVALUATE = 0, 1  # what a generator is for: enters its seed


@dataclass
class Seat:
    """One seed's place in a worker: its environment, where its episode stands, and its chance, which depends on the
    seed and on the iteration in which this crew began."""

    simulator: Simulator
    seed: int
    began: int = 0
    episode: int = 0
    obs: np.ndarray | None = None
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, _COLLECT, self.began])

    def collect(self, policy: NumpyPolicy | None, num_steps: int) -> Batch:
        """Steps with a sampling policy, or with uniform actions; an unfinished episode goes on in the next call."""
        spec = self.simulator.spec
        rows = [
            (num_steps, spec.obs_size),
            (num_steps, spec.act_size),
            (num_steps,),
            (num_steps, spec.obs_size),
        ]
        obs, act, reward, next_obs = (np.empty(shape, np.float32) for shape in rows)
        terminated = np.zeros(num_steps, np.float32)
        for t in range(num_steps):
            if self.obs is None:
                self.obs = self.simulator.reset(_reset_seed(self.seed, _COLLECT, self.began, self.episode))
                self.episode += 1
            obs[t] = self.obs
            act[t] = self.rng.uniform(-1, 1, spec.act_size) if policy is None else policy.act(self.obs, self.rng)
            next_obs[t], reward[t], ended, cut = self.simulator.step(act[t])
            terminated[t] = ended
            self.obs = None if ended or cut else next_obs[t]
        return {"obs": obs, "act": act, "reward": reward, "next_obs": next_obs, "terminated": terminated}

    def evaluate(self, policy: NumpyPolicy | None, step: int, num_episodes: int) -> float:
        """Mean return of test episodes with the deterministic policy, or with uniform actions; seeded by the step."""
        rng = np.random.default_rng([self.seed, _EVALUATE, step])
        total = 0.0
        for episode in range(num_episodes):
            obs, done = self.simulator.reset(_reset_seed(self.seed, _EVALUATE, step, episode)), False
            while not done:
                act = rng.uniform(-1, 1, self.simulator.spec.act_size) if policy is None else policy.act(obs)
                obs, reward, ended, cut = self.simulator.step(act)
                total += reward
                done = ended or cut
        self.obs = None  # whatever episode was running here is over
        return total / num_episodes


def _reset_seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


class Crew:
    """Collecting and evaluating workers for all seeds of a run. Use it as a context manager.

    `began` is the iteration at which this crew starts. An environment object (rather than a way to make one) cannot be
    sent to another process: pass `make_env` that returns it and `in_process=True`, for one seed; an evaluation then
    ends the episode that was being collected.
    """

    def __init__(
        self,
        make_env: Callable[[], gym.Env],
        spec: EnvSpec,
        seeds: list[int],
        began: int = 0,
        in_process: bool = False,
    ):
        self.seeds = seeds
        spec = replace(spec, terminates=None)  # workers only step; a user's rule may hold on to anything
        if in_process:
            bench = _Bench(make_env, spec, began)
            self._collectors, self._evaluators = [_LocalWorker(bench, seeds)], [_LocalWorker(bench, seeds)]
        else:
            recipe = _pickled(make_env, spec, began)
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            self._collectors, self._evaluators = [], []
            with ExitStack() as on_failure:  # whatever was started is closed again if the next one cannot be
                on_failure.callback(self.close)
                for group, most in ((self._collectors, cores), (self._evaluators, max(1, cores // 2))):
                    size = min(len(seeds), most)
                    for i in range(size):
                        group.append(_RemoteWorker(recipe, seeds[i::size]))
                on_failure.pop_all()
        self._queues: list[deque[tuple[int, dict[int, tuple]]]] = [deque() for _ in self._evaluators]

    def collect(self, policies: list[NumpyPolicy] | None, num_steps: int) -> Batch:
        """Steps of every seed, `[seed, step, ...]`; uniform actions without policies."""
        by_seed = dict(zip(self.seeds, policies or [None] * len(self.seeds), strict=True))
        for worker in self._collectors:
            worker.send("collect", {seed: (by_seed[seed], num_steps) for seed in worker.seeds})
        found: dict[int, Batch] = {}
        for worker in self._collectors:
            found |= worker.receive()
        return {name: np.stack([found[seed][name] for seed in self.seeds]) for name in found[self.seeds[0]]}

    def start_evaluation(self, policies: list[NumpyPolicy] | None, step: int, num_episodes: int) -> None:
        """Queues test episodes of every seed; `finished_evaluations` brings the results."""
        by_seed = dict(zip(self.seeds, policies or [None] * len(self.seeds), strict=True))
        for worker, queue in zip(self._evaluators, self._queues, strict=True):
            queue.append((step, {seed: (by_seed[seed], step, num_episodes) for seed in worker.seeds}))
            if len(queue) == 1:
                worker.send("evaluate", queue[0][1])

    def finished_evaluations(self, block: bool = False) -> list[tuple[int, int, float]]:
        """(step, seed, mean return) of each evaluation that is done; with `block`, of all that were started."""
        done = []
        for worker, queue in zip(self._evaluators, self._queues, strict=True):
            while queue and (block or worker.ready()):
                step, _ = queue.popleft()
                done += [(step, seed, value) for seed, value in worker.receive().items()]
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


class _Bench:
    """The seats of one worker, and the calls it answers."""

    def __init__(self, make_env: Callable[[], gym.Env], spec: EnvSpec, began: int):
        self._make_env, self._spec, self._began = make_env, spec, began
        self._seats: dict[int, Seat] = {}

    def answer(self, call: str, arguments: dict[int, tuple]) -> dict[int, Any]:
        return {seed: getattr(self._seat(seed), call)(*given) for seed, given in arguments.items()}

    def _seat(self, seed: int) -> Seat:
        if seed not in self._seats:
            self._seats[seed] = Seat(Simulator(self._make_env(), self._spec), seed, self._began)
        return self._seats[seed]


class _LocalWorker:
    """A worker without a process: the environment stays where the user made it."""

    def __init__(self, bench: "_Bench", seeds: list[int]):
        self.seeds = seeds
        self._bench = bench
        self._answers: list[dict[int, Any]] = []

    def send(self, call: str, arguments: dict[int, tuple]) -> None:
        self._answers.append(self._bench.answer(call, arguments))

    def ready(self) -> bool:
        return bool(self._answers)

    def receive(self) -> dict[int, Any]:
        return self._answers.pop(0)

    def dismiss(self) -> None:
        self._answers.clear()

    def await_end(self, deadline: float) -> None:
        """There is no process to wait for."""


class _RemoteWorker:
    """A worker process and the pipe to it."""

    def __init__(self, recipe: bytes, seeds: list[int]):
        self.seeds = seeds
        self._pipe, theirs = Pipe()
        one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "doublehorizon.workers", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what an environment prints must not mix with a command's own output
            env=os.environ | one_thread | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )
        theirs.close()
        self._pipe.send_bytes(recipe)

    def send(self, call: str, arguments: dict[int, tuple]) -> None:
        try:
            self._pipe.send((call, arguments))
        except OSError as problem:
            raise self._lost() from problem

    def ready(self) -> bool:
        return bool(wait([self._pipe], timeout=0))

    def receive(self) -> dict[int, Any]:
        try:
            kind, answer = self._pipe.recv()
        except (EOFError, OSError) as problem:
            raise self._lost() from problem
        if kind == "mistake":
            raise UserError(answer)
        if kind == "failure":
            raise RunError(f"the environment of seed(s) {self.seeds} failed:\n{answer}")
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

    def _lost(self) -> RunError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)  # so that its status can be told
        return RunError(f"the worker of seed(s) {self.seeds} died (status {self._process.poll()}).")


def _pickled(make_env: Callable[[], gym.Env], spec: EnvSpec, began: int) -> bytes:
    try:
        return cloudpickle.dumps((make_env, spec, began))
    except Exception as problem:  # whatever a user's object raises when it is pickled
        raise UserError(
            f"the function that makes {spec.name} cannot be sent to worker processes: {problem!r}. Let it build the "
            "environment from plain values, or pass an environment object for one seed."
        ) from problem


def serve(pipe: Connection) -> None:
    """The worker's life: answers calls until the pipe closes."""
    bench = _Bench(*cloudpickle.loads(pipe.recv_bytes()))
    while True:
        try:
            call, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = ("answer", bench.answer(call, arguments))
        except UserError as problem:
            answer = ("mistake", str(problem))
        except Exception:
            answer = ("failure", traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:
            return


if __name__ == "__main__":
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    serve(Connection(int(sys.argv[1])))
