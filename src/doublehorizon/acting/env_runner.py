"""Runs one environment of one seed: collects experience and test episodes, with NumPy alone."""

import faulthandler
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

import gymnasium as gym
import numpy as np

from doublehorizon.acting.exploration import (
    EpisodeTime,
    Exploration,
    FirstActions,
    independent_actions,
    is_random_episode,
    white_noise,
)
from doublehorizon.acting.policy import NumpyPolicy
from doublehorizon.envs.make import EnvSpec, Simulator
from doublehorizon.errors import RunError, UserError

Batch = dict[str, np.ndarray]
"""Transitions field by field, as in `algorithm.types.Transition`: `[step, ...]`, or `[seed, step, ...]`."""

RunnerId = tuple[int, int]
"""Seed, and the index of one of its environments."""

_FIELDS = ("obs", "act", "reward", "next_obs", "terminated")
_COLLECT, _EVALUATE = 0, 1  # what a generator is for: enters its seed
_ALARMS = 5  # of a watchdog, after which a process is stuck
_RESET = 2**20  # after the others: a reset and the actions at the same step are independent


@dataclass(frozen=True)
class WorkerSpec:
    """What every worker of a pool is given. `seed_policy` acts before the first fit, on the environment's own
    observations and in its own units, instead of random actions; with `random_episodes` some later episodes are random,
    too. `replays` says whether an interrupted episode may be continued by repeating its actions in another process:
    never where they could move a machine. `is_single`: the environment is the only one, in the main process."""

    make_env: Callable[[], gym.Env]
    spec: EnvSpec
    seed_policy: Any = None
    exploration: Exploration = white_noise
    first_actions: FirstActions = independent_actions
    random_episodes: bool = False
    step_timeout: float = 300.0
    replays: bool = True
    is_single: bool = False


@dataclass(frozen=True)
class Episode:
    """An unfinished episode, such that it can be replayed in any deterministic environment: the seed of its reset, the
    observation that this returned, the actions since `[step, act]`, the observation they led to, and whether its
    actions are random."""

    reset_seed: int
    first_obs: np.ndarray
    actions: np.ndarray
    obs: np.ndarray
    is_random: bool = False


@dataclass(frozen=True)
class MonteCarloSpec:
    """How a value is estimated by real episodes: their number and most steps, and how rewards and entropy bonuses are
    weighted."""

    episodes: int
    horizon: int
    discount: float
    temperature: float


@dataclass(frozen=True)
class Collected:
    """Transitions, the episode that is still running, if one is, return and length of those that ended, the length of
    the longest one that was truncated, 0 where none was, and of the longest of all, running ones included. `exact` is
    False where an episode was to be continued in another process and its replay came out elsewhere."""

    batch: Batch
    episode: Episode | None
    ended: list[tuple[float, int]]
    longest_cut: int = 0
    longest: int = 0
    exact: bool = True


class Watchdog:
    """Writes to `file` where this process is, each time that a step or reset has taken another part of the timeout. It
    works even where the simulator never returns to Python. See `stuck_at`."""

    def __init__(self, timeout: float, file: TextIO):
        self._timeout, self._file, self._armed, self._place = timeout, file, -np.inf, ""

    def touch(self, seed: int, step: int) -> None:
        """The environment is alive. The alarm is set anew ten times per timeout or once a second at most: to set it
        costs as much as a quick step."""
        now = time.monotonic()
        if now - self._armed > min(1.0, 0.1 * self._timeout):
            self._place = f"{seed} {step}\n"
            self.rest()
            self._armed = now
            faulthandler.dump_traceback_later(self._timeout / (_ALARMS - 1), repeat=True, file=self._file)

    def rest(self) -> None:
        """Nothing is being waited for, and earlier alarms do not count."""
        faulthandler.cancel_dump_traceback_later()
        self._armed = -np.inf
        self._file.seek(0)
        self._file.truncate()
        self._file.write(self._place)
        self._file.flush()


def stuck_at(log: str) -> tuple[tuple[int, int] | None, str]:
    """Seed and step at which a process last was, by its watchdog's file, and the traceback of where it is stuck, if it
    is. One alarm more than fills the timeout is needed: a process that was stopped (Ctrl-Z) raises one when it
    continues, however short the time that it really ran."""
    place, _, rest = log.partition("\n")
    alarms = rest.split("Timeout (")[1:]
    parts = place.split()
    at = (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(map(str.isdecimal, parts)) else None
    return at, f"Timeout ({alarms[-1]}" if len(alarms) >= _ALARMS else ""


@dataclass
class EnvRunner:
    """Steps one environment of one seed. Its random numbers depend on the seed, on the environment's index and on the
    step of the run, never on earlier calls: a resumed run draws the same."""

    simulator: Simulator
    seed: int
    env_index: int = 0
    seed_policy: Any = None
    exploration: Exploration = white_noise
    first_actions: FirstActions = independent_actions
    random_episodes: bool = False
    watchdog: Watchdog | None = None
    replays: bool = True
    is_single: bool = False
    """Whether it is the only one, in the main process: it waits while the agent learns."""
    rows: list[tuple[np.ndarray, np.ndarray, float, np.ndarray, bool]] = field(default_factory=list)
    """The steps of the current call of `collect`."""
    obs: np.ndarray | None = None
    """The last observation of the running episode; None where none is running."""
    reset_seed: int = 0
    first_obs: np.ndarray | None = None
    is_random: bool = False
    actions: list[np.ndarray] = field(default_factory=list)
    total: float = 0.0
    """The running episode's rewards so far."""

    def collect(
        self,
        step: int,
        policy: NumpyPolicy | None,
        num_steps: int,
        episode: Episode | None = None,
        to_end: bool = False,
    ) -> Collected:
        """`num_steps` steps with a sampling policy; without one, with the seed policy or uniform actions. An unfinished
        episode goes on in the next call; with `to_end` it is acted on until it ends, unless the environment can be
        paused. `step` is the run's, `episode` the one that is running then."""
        self.rows = []
        exact = self.restore(step, episode)
        self._end_wait()
        spec, rng = self.simulator.spec, np.random.default_rng(self._rng_seed(step))
        episodes, longest_cut, longest = [], 0, 0
        to_end = to_end and not self.simulator.can_pause
        while len(self.rows) < num_steps or (to_end and self.obs is not None):
            here = step + len(self.rows) * spec.action_repeat
            with self._reported(here, "step"):
                obs = self.obs
                if obs is None:
                    obs = self._reset(_reset_seed(self._rng_seed(here)), here)
                    self.is_random = self.random_episodes and is_random_episode(self.reset_seed, here, spec)
                time = EpisodeTime(self.reset_seed, len(self.actions), spec.time_limit)
                act = np.asarray(self._act(policy, obs, rng, time), np.float32)  # as it is stored, and repeated
                next_obs, reward, ended, cut = self._step(act)
            self.rows.append((obs, act, reward, next_obs, ended))
            longest_cut = max(longest_cut, len(self.actions) if cut and not ended else 0)
            longest = max(longest, len(self.actions))
            self.obs = None if ended or cut else next_obs
            if self.obs is None and not self.is_random:  # one that is random now and then says nothing of the policy
                episodes.append((self.total, len(self.actions)))
        return Collected(self.batch(), self._unfinished(), episodes, longest_cut, longest, exact)

    def batch(self) -> Batch:
        """The steps of the last call of `collect`, also of one that was interrupted."""
        fields = zip(*self.rows, strict=True) if self.rows else ((),) * len(_FIELDS)
        sizes = {"obs": (self.simulator.spec.obs_size,), "act": (self.simulator.spec.act_size,)}
        sizes["next_obs"] = sizes["obs"]
        return {
            name: np.asarray(values, np.float32).reshape(-1, *sizes.get(name, ()))
            for name, values in zip(_FIELDS, fields, strict=True)
        }

    def hold(self) -> None:
        """Nobody acts for a while: the environment is paused, if it can be. Whether an episode is running says nothing:
        an environment does not know that a time limit has ended one, and a step may have been interrupted."""
        self.simulator.pause()

    def _end_wait(self) -> None:
        """After a wait the environment may stand elsewhere: what it observes now counts. If it was paused and can't say
        that, its episode is truncated there."""
        if self.obs is None or not self.is_single:
            return
        was_paused, now = self.simulator.resume(), self.simulator.observe()
        if now is not None or was_paused:
            self.obs = now

    def restore(self, step: int, episode: Episode | None) -> bool:
        """Continue the episode that was interrupted, if one was; return whether that is possible. Otherwise a new one
        begins."""
        if self.obs is not None and self.simulator.moved():
            self.obs = None
            return False
        return episode is None or self.obs is not None or (self.replays and self._replay(episode, step))

    def evaluate(self, step: int, policy: NumpyPolicy | None, num_episodes: int) -> float:
        """Mean return of test episodes."""
        return float(np.mean(self.episode_returns(step, policy, num_episodes)))

    def episode_returns(self, step: int, policy: NumpyPolicy | None, num_episodes: int) -> list[float]:
        """Returns of test episodes with the deterministic policy; without one, as `collect` acts. Seeded by the
        step."""
        rng = np.random.default_rng([self.seed, _EVALUATE, step])
        self.obs = None  # whatever episode was running here is over
        returns = []
        for episode in range(num_episodes):
            reset_seed, t, total = _reset_seed([self.seed, _EVALUATE, step, episode]), 0, 0.0
            with self._reported(step, "a test at step"):
                obs, done = self.simulator.reset(reset_seed), False
            while not done:
                with self._reported(step, "a test at step"):
                    time = EpisodeTime(reset_seed, t, self.simulator.spec.time_limit)
                    act = self._first_action(obs, rng, time) if policy is None else policy.act(obs)
                    obs, reward, ended, cut = self.simulator.step(act)
                total, t = total + reward, t + 1
                done = ended or cut
            returns.append(total)
        return returns

    def monte_carlo_returns(
        self, step: int, policy: NumpyPolicy, pairs: list[tuple], spec: MonteCarloSpec
    ) -> np.ndarray:
        """Discounted soft returns `[pair, episode]` from pairs of observation and action, after which the policy acts
        as it samples. `step` numbers the pairs, for their random numbers."""
        self.obs = None
        returns = np.zeros((len(pairs), spec.episodes))
        for i, (obs, act) in enumerate(pairs):
            rng = np.random.default_rng([self.seed, _EVALUATE, step + i])
            for episode in range(spec.episodes):
                with self._reported(step + i, "the value of pair"):
                    returns[i, episode] = self._soft_return(policy, obs, act, spec, rng)
        return returns

    def _soft_return(
        self, policy: NumpyPolicy, obs: np.ndarray, act: np.ndarray, spec: MonteCarloSpec, rng: np.random.Generator
    ) -> float:
        self.simulator.put(obs, int(rng.integers(2**31)))
        total, weight = 0.0, 1.0
        for _ in range(spec.horizon):
            self._touch(0)
            obs, reward, ended, _ = self.simulator.step(act, endless=True)
            total, weight = total + weight * reward, weight * spec.discount
            if ended:
                break
            act, log_prob = policy.sample(obs, rng)
            total -= weight * spec.temperature * float(log_prob)
        return total

    def _reset(self, reset_seed: int, step: int) -> np.ndarray:
        self.reset_seed, self.actions, self.total = reset_seed, [], 0.0
        self.obs = self.first_obs = obs = self.simulator.reset(reset_seed)
        self._touch(step)
        return obs

    def _step(self, act: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        """A step of the running episode. If it does not come back, nobody knows where the environment stands."""
        self.obs = None
        found = self.simulator.step(act)
        self.actions.append(act)
        self.total += found[1]
        return found

    def _unfinished(self) -> Episode | None:
        if self.obs is None or self.first_obs is None:
            return None
        actions = np.asarray(self.actions, np.float32).reshape(-1, self.simulator.spec.act_size)
        return Episode(self.reset_seed, self.first_obs, actions, self.obs, self.is_random)

    def _replay(self, episode: Episode, step: int) -> bool:
        """Lead the environment to where the episode stood, by the same reset and the same actions. If the reset returns
        another observation, no action is repeated, and the episode that has just begun goes on. If the actions lead
        elsewhere, the environment is not deterministic, and a new episode begins."""
        over = False
        with self._reported(step, "repeating an episode at step"):
            self._reset(episode.reset_seed, step)
            self.is_random = False
            if self.obs is None or not np.array_equal(self.obs, episode.first_obs):
                return False
            self.is_random = episode.is_random
            for act in episode.actions:
                if over:
                    break
                self._touch(step)
                self.obs, _, ended, cut = self._step(act)
                over = ended or cut
        if over or self.obs is None or not np.array_equal(self.obs, episode.obs):
            self.obs = None
            return False
        return True

    def _act(
        self, policy: NumpyPolicy | None, obs: np.ndarray, rng: np.random.Generator, time: EpisodeTime
    ) -> np.ndarray:
        if policy is None or self.is_random:
            return self._first_action(obs, rng, time)
        return policy.act(obs, self.exploration(rng, self.simulator.spec.act_size, time))

    def _first_action(self, obs: np.ndarray, rng: np.random.Generator, time: EpisodeTime) -> np.ndarray:
        """Before the first fit: random, or the seed policy's."""
        if self.seed_policy is None:
            return self.first_actions(rng, self.simulator.spec.act_size, time)
        if isinstance(self.seed_policy, NumpyPolicy):
            return self.seed_policy.act(obs, rng.standard_normal(self.simulator.spec.act_size, np.float32))
        seen, policy = self.simulator.seen, self.seed_policy
        try:
            chosen = policy.predict(seen)[0] if hasattr(policy, "predict") else policy(seen)
        except Exception as problem:  # whatever a user's controller raises
            at = traceback.extract_tb(problem.__traceback__)[-1]
            raise UserError(
                f"the seed policy raised {problem!r}, in {at.name} ({at.filename}:{at.lineno})"
            ) from problem
        return self.simulator.to_unit(chosen)

    def _rng_seed(self, step: int) -> list[int]:
        """What a generator for collecting is seeded with. A seed's first environment draws the same as if it were the
        only one."""
        return [self.seed, _COLLECT, step] + ([self.env_index] if self.env_index else [])

    def _touch(self, step: int) -> None:
        if self.watchdog is not None:
            self.watchdog.touch(self.seed, step)

    @contextmanager
    def _reported(self, step: int, where: str) -> Iterator[None]:
        """Problems inside are reported with seed and step: what is a mistake of the environment's author in one line,
        what it raises itself with its traceback."""
        self._touch(step)
        try:
            yield
        except UserError as problem:
            raise UserError(f"{problem} (seed {self.seed}, {where} {step})") from problem
        except Exception as problem:
            raise RunError(
                f"{self.simulator.spec.name} failed (seed {self.seed}, {where} {step}):\n{traceback.format_exc()}"
            ) from problem


def _reset_seed(parts: list[int]) -> int:
    return int(np.random.SeedSequence([*parts, _RESET]).generate_state(1)[0])


class RunnerGroup:
    """The runners of one worker, made when they are first called."""

    def __init__(self, spec: WorkerSpec, watchdog: Watchdog | None = None):
        self._spec, self._watchdog = spec, watchdog
        self._runners: dict[RunnerId, EnvRunner] = {}

    def call(self, method: str, arguments: dict[RunnerId, tuple]) -> dict[RunnerId, Any]:
        """Calls a method of some runners, each with its own arguments, the first of which is the step of the run."""
        try:
            return {at: getattr(self._runner(at, step), method)(step, *rest) for at, (step, *rest) in arguments.items()}
        finally:
            if self._watchdog is not None:
                self._watchdog.rest()

    def hold(self) -> None:
        """Nobody acts for a while; see `EnvRunner.hold`."""
        for runner in self._runners.values():
            runner.hold()

    def release(self) -> None:
        """The environments are somebody else's from now on, and none of them is paused."""
        for runner in self._runners.values():
            runner.simulator.resume()
        self._runners = {}

    def forget(self) -> None:
        """The steps of the last calls of `collect` are kept elsewhere."""
        for runner in self._runners.values():
            runner.rows = []

    def interrupted(self) -> dict[RunnerId, Batch]:
        """The steps of each runner's last call of `collect`, however that ended."""
        return {at: runner.batch() for at, runner in self._runners.items()}

    def close(self) -> None:
        """Closes the environments, which may hold on to processes or machines of their own."""
        for runner in self._runners.values():
            with suppress(Exception):  # the run is over: nobody is left to tell
                runner.simulator.close()

    def _runner(self, at: RunnerId, step: int) -> EnvRunner:
        if at not in self._runners:
            if self._watchdog is not None:
                self._watchdog.touch(at[0], step)
            spec = self._spec
            simulator = Simulator(spec.make_env(), spec.spec)
            acting = (spec.seed_policy, spec.exploration, spec.first_actions, spec.random_episodes)
            self._runners[at] = EnvRunner(simulator, *at, *acting, self._watchdog, spec.replays, spec.is_single)
        return self._runners[at]
