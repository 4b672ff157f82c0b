"""Callbacks: what is called while a run trains, and those that most people want. All of them look at the run alone, so
that a resumed run goes on as if it had never been stopped."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym

from doublehorizon.acting.env_runner import EnvRunner
from doublehorizon.acting.policy import NumpyPolicy
from doublehorizon.atomic_files import disk_errors_reported, read_json, write_file
from doublehorizon.envs.make import EnvLike, Simulator, describe, factory
from doublehorizon.errors import UserError
from doublehorizon.run.progress import Progress


@dataclass(frozen=True)
class Evaluation:
    """A test that is done: at which step it was started, each seed's mean return, and the policies that it tested; None
    before the first fit."""

    step: int
    returns: dict[int, float]
    policies: list[NumpyPolicy] | None

    @property
    def mean(self) -> float:
        """Over all seeds."""
        return _mean(self.returns)


class Callback:
    """Base class for callbacks. Each method but the first may return False to stop the run; a plain function in its
    place is called as `on_iteration`."""

    def on_start(self, progress: Progress) -> None:
        """Before the first step: what cannot work is told here, as a `dh.UserError`."""

    def on_iteration(self, progress: Progress) -> bool | None:
        """After each iteration; `progress.step`, `progress.policies` and `progress.last_returns()` say how it goes."""

    def on_evaluation(self, progress: Progress, evaluation: Evaluation) -> bool | None:
        """When a test is done. It runs in the background, so `progress.step` may be beyond the step at which it was
        started."""


class StopAtReturn(Callback):
    """Stops when the mean test return of the seeds reaches `value`; with `every_seed`, when each one's does."""

    def __init__(self, value: float, every_seed: bool = False):
        if not isinstance(value, int | float):
            raise UserError(f"value is {value!r}, but the return to stop at is a number.")
        self.value, self.every_seed = value, every_seed

    def on_evaluation(self, progress: Progress, evaluation: Evaluation) -> bool:
        del progress
        reached = min(evaluation.returns.values()) if self.every_seed else evaluation.mean
        return reached < self.value


class StopWithoutImprovement(Callback):
    """Stops when the last `tests` tests were all no better than an earlier one, by the mean of the seeds."""

    def __init__(self, tests: int = 5):
        if tests < 1:
            raise UserError(f"tests is {tests}, but at least 1 is needed.")
        self.tests = tests

    def on_evaluation(self, progress: Progress, evaluation: Evaluation) -> bool:
        means = [_mean(returns) for step, returns in sorted(progress.returns.items()) if step <= evaluation.step]
        earlier, last = means[: -self.tests], means[-self.tests :]
        return not earlier or max(last) > max(earlier)


class BestTest(NamedTuple):
    """A mean test return, and whose it was."""

    value: float
    seed: int
    step: int


class SaveBest(Callback):
    """Keeps the policy with the best test return so far, of any seed, in one file that `dh.load_policy` reads; a JSON
    file beside it says which test that was."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def on_start(self, progress: Progress) -> None:
        beside = self.path.with_name(f"{self.path.name}.writable")
        try:
            beside.parent.mkdir(parents=True, exist_ok=True)
            beside.touch()
            beside.unlink()
        except OSError as problem:
            raise UserError(f"{self.path} cannot be written: {problem.strerror}.") from problem

    def on_evaluation(self, progress: Progress, evaluation: Evaluation) -> None:
        if evaluation.policies is None:
            return
        seed, value = max(evaluation.returns.items(), key=lambda pair: pair[1])
        before = self.best()
        if before is None or value > before.value:
            with disk_errors_reported(self.path):
                evaluation.policies[progress.seeds.index(seed)].save(self.path)
                write_file(self._record, (json.dumps(BestTest(value, seed, evaluation.step)._asdict()) + "\n").encode())

    def best(self) -> BestTest | None:
        """The test of the policy that is kept; None where there is none."""
        if not (self.path.exists() and self._record.exists()):
            return None
        try:
            return BestTest(**read_json(self._record))
        except (OSError, ValueError, TypeError) as problem:
            raise UserError(
                f"{self._record} is damaged ({problem}): delete it, and the next test is kept."
            ) from problem

    @property
    def _record(self) -> Path:
        return self.path.with_suffix(".json")


class EvaluateOn(Callback):
    """Tests each seed's policy on another environment too, such as one with other masses: every so many iterations and
    at the end, in this process. `returns` has the mean returns by step and seed."""

    def __init__(self, env: EnvLike, every: int = 10, episodes: int = 10):
        if min(every, episodes) < 1:
            raise UserError(f"every is {every} and episodes {episodes}, but at least 1 is needed.")
        self.env, self.every, self.episodes = env, every, episodes
        self.returns: dict[int, dict[int, float]] = {}

    def on_start(self, progress: Progress) -> None:
        self._close(self._simulator(progress))

    def on_iteration(self, progress: Progress) -> None:
        is_time = progress.iteration % self.every == 0 or progress.step >= progress.goal
        if progress.policies is None or not is_time:
            return
        simulator = self._simulator(progress)
        self.returns[progress.step] = {
            seed: EnvRunner(simulator, seed).evaluate(progress.step, policy, self.episodes)
            for seed, policy in zip(progress.seeds, progress.policies, strict=True)
        }
        self._close(simulator)

    def _simulator(self, progress: Progress) -> Simulator:
        env = factory(self.env, progress.config.loop)()
        spec = describe(env, progress.config, self.env if isinstance(self.env, str) else None)
        if (spec.obs_size, spec.act_size) != (progress.spec.obs_size, progress.spec.act_size):
            raise UserError(
                f"{spec.name} has {spec.obs_size} observations and {spec.act_size} actions, but the policy has "
                f"{progress.spec.obs_size} and {progress.spec.act_size}: it cannot be tested there."
            )
        return Simulator(env, spec)

    def _close(self, simulator: Simulator) -> None:
        if not isinstance(self.env, gym.Env):  # that is the user's own
            simulator.close()


CallbackLike = Callback | Callable[[Progress], Any] | Sequence[Callback] | None
"""What may be given for a callback; several are called one after the other."""


class _Function(Callback):
    def __init__(self, function: Callable[[Progress], Any]):
        self._function = function

    def on_iteration(self, progress: Progress) -> Any:
        return self._function(progress)


class _Several(Callback):
    """All are called, whatever each of them says."""

    def __init__(self, callbacks: list[Callback]):
        self._callbacks = callbacks

    def on_start(self, progress: Progress) -> None:
        for one in self._callbacks:
            one.on_start(progress)

    def on_iteration(self, progress: Progress) -> bool:
        return all([one.on_iteration(progress) is not False for one in self._callbacks])

    def on_evaluation(self, progress: Progress, evaluation: Evaluation) -> bool:
        return all([one.on_evaluation(progress, evaluation) is not False for one in self._callbacks])


def as_callback(given: Any) -> Callback:
    """What was given, as one callback; what is none is told at once."""
    if given is None:
        return Callback()
    if isinstance(given, Callback):
        return given
    if isinstance(given, list | tuple):
        return _Several([as_callback(one) for one in given])
    if hasattr(given, "init_callback"):
        raise UserError(
            f"callback is Stable-Baselines3's {type(given).__name__}, which needs its training loop. dh.callbacks has "
            "StopAtReturn, StopWithoutImprovement, SaveBest and EvaluateOn; test returns are in eval.csv."
        )
    if callable(given) and not isinstance(given, type):
        return _Function(given)
    raise UserError(
        f"callback is {given!r}, but it must be a dh.Callback, a function of the run's progress, or a list of these."
    )


def _mean(returns: dict[int, float]) -> float:
    return sum(returns.values()) / len(returns)
