"""From what a user names (an id, a callable, an environment) to something with flat observations and actions in
[-1, 1], or to one line that says why not."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from doublehorizon.config import LoopConfig
from doublehorizon.envs import paper
from doublehorizon.envs.termination import Rule, find_rule, never
from doublehorizon.errors import UserError

EnvLike = str | Callable[[], gym.Env] | gym.Env


@dataclass(frozen=True)
class EnvSpec:
    """What training must know of an environment; steps are the agent's. `terminates` is None where no rule is known,
    and `registered` says that `name` alone makes the same environment again."""

    name: str
    obs_size: int
    act_size: int
    time_limit: int
    action_repeat: int
    terminates: Rule | None
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    registered: bool = False

    @property
    def never_ends(self) -> bool:
        """Whether only the time limit ends an episode, or is taken to, as no other rule is known."""
        return self.terminates is None or self.terminates is never

    def facts(self) -> dict[str, Any]:
        """Plain values, as they are saved with a run; the termination rule is named, not stored."""
        named = "unknown" if self.terminates is None else getattr(self.terminates, "__qualname__", "a user's own")
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "terminates"}
        return plain | {"termination": named}


def factory(env: EnvLike, max_steps: int | None = None) -> Callable[[], gym.Env]:
    """A callable that makes the environment; an environment itself is handed out as it is. `max_steps` replaces the
    time limit that an id was registered with."""
    if isinstance(env, str):
        return partial(make, env, max_steps)
    if isinstance(env, gym.Env):
        return lambda: env
    if callable(env):
        return env
    raise UserError(
        f"env is a {type(env).__name__}, but it must be a Gymnasium id such as 'Pendulum-v1', a function that makes "
        "an environment, or an environment."
    )


def make(env_id: str, max_steps: int | None = None) -> gym.Env:
    """Makes a registered environment; an unknown id is answered with the nearest ones."""
    paper.register()
    try:
        gym.spec(env_id)
    except gym.error.Error as problem:
        by_name = {name.lower(): name for name in gym.registry}
        near = difflib.get_close_matches(env_id.lower(), by_name, n=3, cutoff=0.5)
        known = ", ".join(by_name[name] for name in near) or "Pendulum-v1, Hopper-v5, paper/HalfCheetah"
        raise UserError(f"there is no environment {env_id!r}. The nearest ids are: {known}.") from problem
    try:
        return gym.make(env_id, max_episode_steps=max_steps, disable_env_checker=True)
    except gym.error.DependencyNotInstalled as problem:
        raise UserError(f"{env_id} needs a package that is not installed: {problem}") from problem


def describe(env: gym.Env, loop: LoopConfig | None = None, registered: bool = False) -> EnvSpec:
    """Reads off an environment what training needs, or says what is missing."""
    loop = loop or LoopConfig()
    name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
    act = _checked_action_space(name, env.action_space)
    return EnvSpec(
        name=name,
        obs_size=_checked_obs_size(name, env.observation_space),
        act_size=int(np.prod(act.shape)),
        time_limit=loop.time_limit or max(1, _registered_time_limit(name, env) // loop.action_repeat),
        action_repeat=loop.action_repeat,
        terminates=find_rule(env),
        action_low=tuple(act.low.ravel().tolist()),
        action_high=tuple(act.high.ravel().tolist()),
        registered=registered,
    )


def _checked_action_space(name: str, space: gym.Space) -> Box:
    if not isinstance(space, Box):
        raise UserError(
            f"{name} has the action space {space}, but DHMBPO needs continuous actions (a Box). For discrete actions "
            "use an algorithm such as DQN or PPO."
        )
    if len(space.shape) != 1:
        raise UserError(
            f"{name} has actions of the shape {space.shape}, but a vector is needed. Wrap it so that they are."
        )
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise UserError(
            f"{name} has an action space without bounds, but actions are scaled to them. Wrap it so that "
            "`action_space` is a Box with finite low and high, e.g. with gymnasium.wrappers.RescaleAction."
        )
    return space


def _checked_obs_size(name: str, space: gym.Space) -> int:
    if not isinstance(space, Box):
        raise UserError(
            f"{name} has the observation space {space}, but DHMBPO needs a Box. Wrap it in "
            "gymnasium.wrappers.FlattenObservation."
        )
    if len(space.shape) >= 2 and space.dtype == np.uint8:
        raise UserError(
            f"{name} observes images {space.shape}, but DHMBPO learns from state vectors. Use an environment that "
            "observes its state, or wrap it with an encoder of your own."
        )
    if len(space.shape) != 1:
        raise UserError(
            f"{name} has observations of the shape {space.shape}, but a vector is needed. Wrap it in "
            "gymnasium.wrappers.FlattenObservation."
        )
    return int(np.prod(space.shape))


def _registered_time_limit(name: str, env: gym.Env) -> int:
    layer: Any = env
    while isinstance(layer, gym.Wrapper):
        if isinstance(layer, gym.wrappers.TimeLimit):
            return int(layer._max_episode_steps)
        layer = layer.env
    if env.spec is not None and env.spec.max_episode_steps is not None:
        return int(env.spec.max_episode_steps)
    raise UserError(
        f"{name} has no time limit, but an iteration is as long as an episode. Give one with "
        "--loop.time-limit N (in Python: LoopConfig(time_limit=N)), or wrap it in gymnasium.wrappers.TimeLimit."
    )


class Simulator:
    """One environment behind the interface that workers use: flat float32 observations, actions in [-1, 1]."""

    def __init__(self, env: gym.Env, spec: EnvSpec):
        self.env, self.spec = env, spec
        self._low = np.asarray(spec.action_low, np.float64)
        self._high = np.asarray(spec.action_high, np.float64)
        self._dtype = env.action_space.dtype
        self._steps = 0

    def reset(self, seed: int) -> np.ndarray:
        obs, _ = self.env.reset(seed=seed)
        self._steps = 0
        return self._flat(obs)

    def step(self, act: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        """Next observation, reward, whether the episode truly ended, whether the time limit cut it off."""
        scaled = self._low + (np.clip(act, -1.0, 1.0) + 1.0) * 0.5 * (self._high - self._low)
        scaled = scaled.astype(self._dtype)
        reward, terminated, truncated, obs = 0.0, False, False, None
        for _ in range(self.spec.action_repeat):
            obs, gained, terminated, truncated, _ = self.env.step(scaled)
            reward += float(gained)
            if terminated or truncated:
                break
        self._steps += 1
        if not np.isfinite(reward):
            raise UserError(f"{self.spec.name} returned the reward {reward} in step {self._steps} of an episode.")
        return (
            self._flat(obs),
            float(reward),
            bool(terminated),
            truncated or self._steps >= self.spec.time_limit,
        )

    def close(self) -> None:
        self.env.close()

    def _flat(self, obs: Any) -> np.ndarray:
        flat = np.asarray(obs, np.float32).reshape(-1)
        if flat.size != self.spec.obs_size or not np.isfinite(flat).all():
            raise UserError(
                f"{self.spec.name} returned an observation of {flat.size} values, {int(np.isfinite(flat).sum())} of "
                f"them finite, in step {self._steps} of an episode; {self.spec.obs_size} finite ones are needed."
            )
        return flat
