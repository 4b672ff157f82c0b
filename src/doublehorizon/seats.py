"""A seed's place at a simulator: collects experience and runs test episodes, with NumPy alone."""

import faulthandler
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

import gymnasium as gym
import numpy as np

from doublehorizon.envs.make import EnvSpec, Simulator
from doublehorizon.errors import RunError, UserError
from doublehorizon.policy import NumpyPolicy

Batch = dict[str, np.ndarray]
"""Transitions of one seed, field by field (the fields of `types.Transition`)."""

SeatId = tuple[int, int]
"""Seed, and which of its environments."""

_COLLECT, _EVALUATE = 0, 1  # what a generator is for: enters its seed
_RESET = 2**20  # behind the others: a reset and the actions at the same step are independent


@dataclass(frozen=True)
class Recipe:
    """What every seat of a crew is made from. `seed_policy` acts before the first fit, on the environment's own
    observations and in its own units, instead of chance."""

    make_env: Callable[[], gym.Env]
    spec: EnvSpec
    seed_policy: Any = None
    step_timeout: float = 300.0


@dataclass(frozen=True)
class Episode:
    """An episode that is still running, told so that it can be brought about again in any environment that repeats
    itself: how it was reset, what was done since, and where that led."""

    reset_seed: int
    actions: np.ndarray
    obs: np.ndarray


@dataclass(frozen=True)
class Appraisal:
    """How a policy's value is found by trying: so many episodes of so many steps at most, each reward and each entropy
    bonus discounted."""

    episodes: int
    horizon: int
    discount: float
    temperature: float


@dataclass(frozen=True)
class Harvest:
    """What a seat collected, and the episode that is still running, if one is. `exact` is False where a running
    episode was to be continued in another process and could not be brought about again."""

    batch: Batch
    episode: Episode | None
    exact: bool = True


class Watch:
    """Ends this process if a step or reset takes too long, leaving behind in `file` where it was stuck. It works even
    where the simulator never gives Python a chance."""

    def __init__(self, timeout: float, file: TextIO):
        self._timeout, self._file, self._armed = timeout, file, -np.inf

    def touch(self, seed: int, step: int) -> None:
        """The environment is alive. The alarm is set anew ten times per timeout or once a second at most: to set it
        costs as much as a quick step."""
        now = time.monotonic()
        if now - self._armed > min(1.0, 0.1 * self._timeout):
            self._armed = now
            self._file.seek(0)
            self._file.truncate()
            self._file.write(f"{seed} {step}\n")
            self._file.flush()
            faulthandler.dump_traceback_later(1.1 * self._timeout, exit=True, file=self._file)

    def rest(self) -> None:
        """Nothing is being waited for."""
        faulthandler.cancel_dump_traceback_later()
        self._armed = -np.inf


@dataclass
class Seat:
    """One environment of one seed, and where its episode stands. Its chance depends on the seed, on which of the
    seed's environments it is, and on where the run stands, but not on what was done before."""

    simulator: Simulator
    seed: int
    place: int = 0
    seed_policy: Any = None
    watch: Watch | None = None
    obs: np.ndarray | None = None
    reset_seed: int = 0
    actions: list[np.ndarray] = field(default_factory=list)

    def collect(self, step: int, policy: NumpyPolicy | None, num_steps: int, episode: Episode | None = None) -> Harvest:
        """Steps with a sampling policy; without one, with the seed policy or uniform actions. An unfinished episode
        goes on in the next call. `step` is where the run stands, `episode` what is running then."""
        exact = self.obs is not None or episode is None or self._bring_about(episode, step)
        spec, rng = self.simulator.spec, np.random.default_rng(self._chance(step))
        shapes = [(num_steps, spec.obs_size), (num_steps, spec.act_size), (num_steps,), (num_steps, spec.obs_size)]
        obs, act, reward, next_obs = (np.empty(shape, np.float32) for shape in shapes)
        terminated = np.zeros(num_steps, np.float32)
        for t in range(num_steps):
            here = step + t * spec.action_repeat
            with self._reported(here, "step"):
                if self.obs is None:
                    self._reset(_drawn_from(self._chance(here)), here)
                obs[t] = self.obs
                act[t] = self._first_action(obs[t], rng) if policy is None else policy.act(obs[t], rng)
                next_obs[t], reward[t], ended, cut = self.simulator.step(act[t])
            terminated[t] = ended
            self.actions.append(act[t])
            self.obs = None if ended or cut else next_obs[t]
        batch = {"obs": obs, "act": act, "reward": reward, "next_obs": next_obs, "terminated": terminated}
        return Harvest(batch, self._running(), exact)

    def evaluate(self, step: int, policy: NumpyPolicy | None, num_episodes: int) -> float:
        """Mean return of test episodes with the deterministic policy; without one, as `collect` acts. Seeded by the
        step."""
        rng = np.random.default_rng([self.seed, _EVALUATE, step])
        total = 0.0
        for episode in range(num_episodes):
            with self._reported(step, "a test at step"):
                obs, done = self.simulator.reset(_drawn_from([self.seed, _EVALUATE, step, episode])), False
            while not done:
                with self._reported(step, "a test at step"):
                    act = self._first_action(obs, rng) if policy is None else policy.act(obs)
                    obs, reward, ended, cut = self.simulator.step(act)
                total += reward
                done = ended or cut
        self.obs = None  # whatever episode was running here is over
        return total / num_episodes

    def appraise(self, step: int, policy: NumpyPolicy, pairs: list[tuple], how: Appraisal) -> np.ndarray:
        """Discounted soft returns from pairs of observation and action, behind which the policy acts by chance:
        `[pair, episode]`. `step` numbers the pairs, for their chance."""
        found = np.zeros((len(pairs), how.episodes))
        for i, (obs, act) in enumerate(pairs):
            rng = np.random.default_rng([self.seed, _EVALUATE, step + i])
            for episode in range(how.episodes):
                with self._reported(step + i, "appraising pair"):
                    found[i, episode] = self._soft_return(policy, obs, act, how, rng)
        self.obs = None
        return found

    def _soft_return(self, policy: NumpyPolicy, obs: np.ndarray, act: np.ndarray, how: Appraisal, rng: Any) -> float:
        self.simulator.put(obs, int(rng.integers(2**31)))
        total, weight = 0.0, 1.0
        for _ in range(how.horizon):
            self._touch(0)
            obs, reward, ended, _ = self.simulator.step(act, endless=True)
            total, weight = total + weight * reward, weight * how.discount
            if ended:
                break
            act, log_prob = policy.sample(obs, rng)
            total -= weight * how.temperature * float(log_prob)
        return total

    def _reset(self, reset_seed: int, step: int) -> None:
        self.reset_seed, self.actions = reset_seed, []
        self.obs = self.simulator.reset(reset_seed)
        self._touch(step)

    def _running(self) -> Episode | None:
        if self.obs is None:
            return None
        actions = np.asarray(self.actions, np.float32).reshape(-1, self.simulator.spec.act_size)
        return Episode(self.reset_seed, actions, self.obs)

    def _bring_about(self, episode: Episode, step: int) -> bool:
        """Leads the environment to where it stood, by the same reset and the same actions. One that does not come out
        there does not repeat itself: then a new episode begins."""
        over = False
        with self._reported(step, "repeating an episode at step"):
            self._reset(episode.reset_seed, step)
            for act in episode.actions:
                if over:
                    break
                self._touch(step)
                self.obs, _, ended, cut = self.simulator.step(act)
                self.actions.append(act)
                over = ended or cut
        if over or self.obs is None or not np.array_equal(self.obs, episode.obs):
            self.obs = None
            return False
        return True

    def _first_action(self, obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Before the first fit: by chance, or by the seed policy."""
        if self.seed_policy is None:
            return rng.uniform(-1, 1, self.simulator.spec.act_size)
        if isinstance(self.seed_policy, NumpyPolicy):
            return self.seed_policy.act(obs, rng)
        seen = self.simulator.seen
        chosen = self.seed_policy.predict(seen)[0] if hasattr(self.seed_policy, "predict") else self.seed_policy(seen)
        return self.simulator.to_unit(chosen)

    def _chance(self, step: int) -> list[int]:
        """What a generator for collecting is seeded with. A seed's first environment has the same chance as if it were
        the only one."""
        return [self.seed, _COLLECT, step] + ([self.place] if self.place else [])

    def _touch(self, step: int) -> None:
        if self.watch is not None:
            self.watch.touch(self.seed, step)

    @contextmanager
    def _reported(self, step: int, where: str) -> Iterator[None]:
        """What goes wrong inside is told with the seed and the step; what is a mistake of the environment's author, in
        one line, what it raises itself, with its traceback."""
        self._touch(step)
        try:
            yield
        except UserError as problem:
            raise UserError(f"{problem} (seed {self.seed}, {where} {step})") from problem
        except Exception as problem:
            raise RunError(
                f"{self.simulator.spec.name} failed (seed {self.seed}, {where} {step}):\n{traceback.format_exc()}"
            ) from problem


def _drawn_from(parts: list[int]) -> int:
    return int(np.random.SeedSequence([*parts, _RESET]).generate_state(1)[0])


class Room:
    """The seats of one worker, and the calls it answers."""

    def __init__(self, recipe: Recipe, watch: Watch | None = None):
        self._recipe, self._watch = recipe, watch
        self._seats: dict[SeatId, Seat] = {}

    def answer(self, call: str, arguments: dict[SeatId, tuple]) -> dict[SeatId, Any]:
        """Lets each seat collect or evaluate, at a step of the run, with a policy, so many steps or episodes."""
        try:
            return {at: getattr(self._seat(at, step), call)(step, *rest) for at, (step, *rest) in arguments.items()}
        finally:
            if self._watch is not None:
                self._watch.rest()

    def close(self) -> None:
        """Closes the environments, which may hold on to processes or machines of their own."""
        for seat in self._seats.values():
            with suppress(Exception):  # the run is over: nobody is left to tell
                seat.simulator.close()

    def _seat(self, at: SeatId, step: int) -> Seat:
        if at not in self._seats:
            recipe = self._recipe
            if self._watch is not None:
                self._watch.touch(at[0], step)
            simulator = Simulator(recipe.make_env(), recipe.spec)
            self._seats[at] = Seat(simulator, *at, recipe.seed_policy, self._watch)
        return self._seats[at]
