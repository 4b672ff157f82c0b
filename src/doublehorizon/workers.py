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
from dataclasses import dataclass, field
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
    """One seed's place in a worker: its environment, where its episode stands, and its chance."""

    simulator: Simulator
    seed: int
    episode: int = 0
    obs: np.ndarray | None = None
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, _COLLECT])

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
                self.obs = self.simulator.reset(_reset_seed(self.seed, _COLLECT, self.episode))
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

    An environment object (rather than a way to make one) cannot be sent to another process: pass `make_env` that
    returns it and `in_process=True`, for one seed.
    """

    def __init__(self, make_env: Callable[[], gym.Env], spec: EnvSpec, seeds: list[int], in_process: bool = False):
        self.seeds = seeds
        self._queues: list[deque[tuple[int, dict[int, tuple]]]]
        if in_process:
            bench = _Bench(make_env, spec)
            self._collectors, self._evaluators = [_LocalWorker(bench, seeds)], [_LocalWorker(bench, seeds)]
            self._queues = [deque()]
            return
        cores = os.cpu_count() or 1
        shares = [seeds[i :: min(len(seeds), cores)] for i in range(min(len(seeds), cores))]
        num_evaluators = min(len(seeds), max(1, cores // 2))
        self._collectors = [_RemoteWorker(make_env, spec, share) for share in shares]
        self._evaluators = [_RemoteWorker(make_env, spec, seeds) for _ in range(num_evaluators)]
        self._queues = [deque() for _ in self._evaluators]

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
        for i, queue in enumerate(self._queues):
            share = self.seeds[i :: len(self._queues)]
            queue.append((step, {seed: (by_seed[seed], step, num_episodes) for seed in share}))
            if len(queue) == 1:
                self._evaluators[i].send("evaluate", queue[0][1])

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
        for worker in (*self._collectors, *self._evaluators):
            worker.close()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Bench:
    """The seats of one worker, and the calls it answers."""

    def __init__(self, make_env: Callable[[], gym.Env], spec: EnvSpec):
        self._make_env, self._spec = make_env, spec
        self._seats: dict[int, Seat] = {}

    def answer(self, call: str, arguments: dict[int, tuple]) -> dict[int, Any]:
        return {seed: getattr(self._seat(seed), call)(*given) for seed, given in arguments.items()}

    def _seat(self, seed: int) -> Seat:
        if seed not in self._seats:  # made when first needed: an evaluator may never see some seeds
            self._seats[seed] = Seat(Simulator(self._make_env(), self._spec), seed)
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

    def close(self) -> None:
        self._answers.clear()


class _RemoteWorker:
    """A worker process and the pipe to it."""

    def __init__(self, make_env: Callable[[], gym.Env], spec: EnvSpec, seeds: list[int]):
        self.seeds = seeds
        self._pipe, theirs = Pipe()
        one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "doublehorizon.workers", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | one_thread | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )
        theirs.close()
        self._pipe.send_bytes(cloudpickle.dumps((make_env, spec)))

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

    def close(self) -> None:
        self._pipe.close()  # the worker reads the end of its pipe and leaves
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _lost(self) -> RunError:
        time.sleep(0.1)  # let the process finish dying, so that its status can be told
        return RunError(f"the worker of seed(s) {self.seeds} died (status {self._process.poll()}).")


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
