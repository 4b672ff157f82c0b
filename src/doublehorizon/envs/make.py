"""From what a user names (an id, a callable, an environment) to something with flat observations and actions in
[-1, 1], or to one line that says why not."""

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from doublehorizon.action_scaling import to_own_units, to_unit
from doublehorizon.config import Config, LoopConfig
from doublehorizon.envs import dmc, paper
from doublehorizon.envs.obs_layout import ObsLayout
from doublehorizon.envs.set_state import put
from doublehorizon.envs.spaces import action_box, flat_observation, layout, observation_size
from doublehorizon.envs.termination import Rule, find_rule, never
from doublehorizon.errors import UserError, unknown

EnvLike = str | Callable[[], gym.Env] | gym.Env


_SEE_THROUGH = (
    gym.ActionWrapper
    | gym.RewardWrapper
    | gym.wrappers.OrderEnforcing
    | gym.wrappers.PassiveEnvChecker
    | gym.wrappers.RecordEpisodeStatistics
    | gym.wrappers.TimeLimit
)
"""Wrappers that leave observations as they are."""

_TIME_LIMIT = 1000  # simulator steps of an episode, where the environment says nothing

Termination = Literal["known", "learned", "never"]


@dataclass(frozen=True)
class EnvSpec:
    """What training must know of an environment; steps are the agent's. `terminates` is the rule by which episodes end
    where one is known, `termination` how the model decides it, and `registered` says that `name` alone makes the same
    environment again. `layout` says how an observation becomes a vector where it is none."""

    name: str
    obs_size: int
    act_size: int
    time_limit: int
    action_repeat: int
    terminates: Rule | None
    termination: Termination
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    registered: bool = False
    layout: ObsLayout | None = None

    @property
    def rule(self) -> Rule | None:
        """The rule that the model rolls out with: None where it learns when episodes end, or where they never do."""
        return self.terminates if self.termination == "known" and self.terminates is not never else None

    @property
    def obs_names(self) -> list[str]:
        """Of each number of an observation."""
        return [f"o{i}" for i in range(self.obs_size)] if self.layout is None else self.layout.names

    def facts(self) -> dict[str, Any]:
        """Plain values, as they are saved with a run; the termination rule is named, not stored."""
        rule = None if self.terminates is None else getattr(self.terminates, "__qualname__", "a user's own")
        layout = None if self.layout is None else self.layout.to_json()
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"terminates": rule, "layout": layout}


def factory(env: EnvLike, loop: LoopConfig | None = None) -> Callable[[], gym.Env]:
    """A callable that makes the environment; an environment itself is handed out as it is. A time limit in `loop`
    replaces the one that an id was registered with."""
    if isinstance(env, str):
        return partial(make, env, loop or LoopConfig())
    if isinstance(env, gym.Env):
        return lambda: env
    if callable(env):
        return env
    raise UserError(
        f"env is a {type(env).__name__}, but it must be a Gymnasium id such as 'Pendulum-v1', a control task such as "
        "'dmc/cheetah-run', a function that makes an environment, or an environment."
    )


def make(name: str, loop: LoopConfig | None = None, render_mode: str | None = None) -> gym.Env:
    """Makes an environment from its name: a Gymnasium id, a task of the control suite, or `module:function`, which is
    given `render_mode` if there is one and it takes it."""
    paper.register()
    found = _from_module(name, render_mode)
    if found is not None:
        return found
    loop = loop or LoopConfig()
    task = None if name in gym.registry else dmc.find_task(name)
    repeat = loop.action_repeat or (1 if task is None else dmc.ACTION_REPEAT)
    max_steps = loop.time_limit and loop.time_limit * repeat
    if task is not None:
        return dmc.ControlSuite(*task, max_steps, render_mode)
    try:
        gym.spec(name)
    except gym.error.Error as problem:
        _explain_file(name)
        by_name = {known.lower(): known for known in gym.registry}
        near = difflib.get_close_matches(name.lower(), by_name, n=3, cutoff=0.5)
        known = ", ".join(by_name[name] for name in near) or "Pendulum-v1, Hopper-v5, paper/HalfCheetah"
        raise UserError(f"there is no environment {name!r}. The nearest ids are: {known}.") from problem
    try:
        return gym.make(name, max_episode_steps=max_steps, disable_env_checker=True, render_mode=render_mode)
    except gym.error.DependencyNotInstalled as problem:
        raise UserError(f"{name} needs a package that is not installed: {problem}") from problem


def _from_module(name: str, render_mode: str | None) -> gym.Env | None:
    """What the function that `module:function` names returns. None where `name` is no such thing, but perhaps
    Gymnasium's own `module:Id-v0`."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        return None
    make_it = imported(name, "makes the environment, such as my_robot:make_env")
    takes = inspect.signature(make_it).parameters
    env = make_it(render_mode=render_mode) if render_mode and "render_mode" in takes else make_it()
    if not isinstance(env, gym.Env):
        raise UserError(f"{name} returned a {type(env).__name__}, but it must return a gymnasium.Env.")
    return env


def _explain_file(name: str) -> None:
    """A file of Python that was named as a file, or without a function in it, is a `UserError`."""
    path, _, function = name.partition(":")
    module = path.removesuffix(".py")
    if Path(f"{module}.py").is_file() and (module != path or not function):
        wanted = f"{'.'.join(Path(os.path.normpath(module)).parts)}:{function or 'FUNCTION'}"
        raise UserError(
            f"there is no environment {name!r}, but there is {module}.py: name the function in it that makes the "
            f"environment, {wanted}."
        )


def imported(name: str, purpose: str) -> Callable:
    """The function that `module:function` names; modules of the working directory count."""
    module, _, function = name.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        place = importlib.import_module(module)
        found = getattr(place, function)
    except ImportError as problem:
        _explain_file(name)
        raise UserError(
            f"{name!r} cannot be imported: {problem}. Name a module that Python finds from here and a function in it "
            f"that {purpose}."
        ) from problem
    except AttributeError:
        own = [key for key, value in vars(place).items() if inspect.isfunction(value) and value.__module__ == module]
        raise unknown(f"function in {module}", function, own) from None
    if not callable(found):
        raise UserError(f"{name!r} is a {type(found).__name__}, but it must be a function that {purpose}.")
    return found


def describe(
    env: gym.Env, config: Config | None = None, registered: str | None = None, rule: Rule | None = None
) -> EnvSpec:
    """Reads off an environment what training needs, or says what is missing. `registered` is the name by which it can
    be made again, `rule` a user's own termination rule."""
    config = config or Config()
    loop, inner = config.loop, env.unwrapped
    is_control = isinstance(inner, dmc.ControlSuite)
    name = registered or (env.spec.id if env.spec is not None else type(inner).__name__)
    act = action_box(name, env.action_space)
    repeat = loop.action_repeat or (dmc.ACTION_REPEAT if is_control else 1)
    rule = rule or find_rule(env)
    return EnvSpec(
        name=name,
        obs_size=observation_size(name, env.observation_space),
        act_size=int(np.prod(act.shape)),
        time_limit=loop.time_limit or max(1, (own_time_limit(env) or _TIME_LIMIT) // repeat),
        action_repeat=repeat,
        terminates=rule,
        termination=_termination(name, config, rule),
        action_low=tuple(act.low.ravel().tolist()),
        action_high=tuple(act.high.ravel().tolist()),
        registered=registered is not None,
        layout=layout(env.observation_space, act),
    )


def _termination(name: str, config: Config, rule: Rule | None) -> Termination:
    if config.termination == "auto":
        return "known" if rule is not None else "learned"
    if config.termination == "known" and rule is None:
        raise UserError(
            f"termination is 'known', but no rule is known for {name}. Give the environment a method "
            "is_terminal(next_obs) that works on arrays [..., observation], or let it be learnt (termination 'auto')."
        )
    return config.termination


def own_time_limit(env: gym.Env) -> int | None:
    """Simulator steps after which a wrapper or the registration cuts an episode; None where nothing is said."""
    layer: Any = env
    while isinstance(layer, gym.Wrapper):
        if isinstance(layer, gym.wrappers.TimeLimit):
            return int(layer._max_episode_steps)
        layer = layer.env
    if isinstance(env.unwrapped, dmc.ControlSuite):
        return env.unwrapped.max_steps
    return env.spec and env.spec.max_episode_steps


def time_limit_note(env: gym.Env, spec: EnvSpec, loop: LoopConfig) -> list[str]:
    """A line for the user, where nobody said how long an episode may be."""
    if loop.time_limit is not None or own_time_limit(env) is not None:
        return []
    return [
        f"note: {spec.name} says nothing of a time limit. Episodes that it does not end by itself are cut after "
        f"{spec.time_limit} steps (--loop.time-limit, in Python config.with_(loop__time_limit=...))."
    ]


def can_pause(env: gym.Env) -> bool:
    """Whether it can hold still in the middle of an episode: it has methods `pause` and `resume`."""
    return all(callable(getattr(env.unwrapped, name, None)) for name in ("pause", "resume"))


class Simulator:
    """One environment behind the interface that workers use: flat float32 observations, actions in [-1, 1]."""

    def __init__(self, env: gym.Env, spec: EnvSpec):
        self.env, self.spec = env, spec
        self._low = np.asarray(spec.action_low, np.float64)
        self._high = np.asarray(spec.action_high, np.float64)
        self._dtype, self._shape = env.action_space.dtype, env.action_space.shape
        self._steps, self._count, self._paused = 0, self._counted(), False
        self.seen: Any = None
        """The last observation as the environment gave it."""

    def reset(self, seed: int) -> np.ndarray:
        self.resume()
        self.seen, _ = self.env.reset(seed=seed)
        self._steps, self._count = 0, self._counted()
        return self._flat(self.seen)

    def step(self, act: np.ndarray, endless: bool = False) -> tuple[np.ndarray, float, bool, bool]:
        """Next observation, reward, terminated, truncated; `endless` goes on beyond the time limit."""
        assert not self._paused, "a paused environment is resumed before it is stepped"
        scaled = to_own_units(np.clip(act, -1.0, 1.0), self._low, self._high)
        scaled = scaled.astype(self._dtype).reshape(self._shape)
        reward, terminated, truncated = 0.0, False, False
        for _ in range(self.spec.action_repeat):
            self.seen, gained, terminated, truncated, _ = self.env.step(scaled)
            reward += float(gained)
            if terminated or (truncated and not endless):
                break
        self._steps, self._count = self._steps + 1, self._counted()
        if not np.isfinite(reward):
            raise UserError(f"{self.spec.name} returned the reward {reward} in step {self._steps} of an episode.")
        return (
            self._flat(self.seen),
            float(reward),
            bool(terminated),
            truncated or self._steps >= self.spec.time_limit,
        )

    def moved(self) -> bool:
        """Whether somebody else has stepped or reset the environment, as far as the counter of a time limit tells."""
        return self._counted() != self._count

    def observe(self) -> np.ndarray | None:
        """What the environment observes now, by its method `observe`; None if it has none, or if a wrapper that may
        change observations, and is no `ObservationWrapper`, stands between."""
        layers = [self.env]
        while isinstance(layers[-1], gym.Wrapper):
            layers.append(layers[-1].env)
        inner = layers.pop()
        method = getattr(inner, "observe", None)
        if not callable(method) or any(p.default is p.empty for p in inspect.signature(method).parameters.values()):
            return None
        if not all(isinstance(layer, gym.ObservationWrapper | _SEE_THROUGH) for layer in layers):
            return None
        seen = method()
        for layer in reversed(layers):
            seen = layer.observation(seen) if isinstance(layer, gym.ObservationWrapper) else seen
        self.seen = seen
        return self._flat(seen)

    @property
    def can_pause(self) -> bool:
        return can_pause(self.env)

    def pause(self) -> None:
        """Let it hold still, if it can."""
        if self.can_pause and not self._paused:
            self.env.unwrapped.pause()  # type: ignore[attr-defined]
            self._paused = True

    def resume(self) -> bool:
        """Let it go on; whether it was paused."""
        was_paused, self._paused = self._paused, False
        if was_paused:
            self.env.unwrapped.resume()  # type: ignore[attr-defined]
        return was_paused

    def _counted(self) -> int | None:
        env = self.env
        while isinstance(env, gym.Wrapper) and not isinstance(env, gym.wrappers.TimeLimit):
            env = env.env
        return env._elapsed_steps if isinstance(env, gym.wrappers.TimeLimit) else None

    def put(self, obs: np.ndarray, seed: int) -> None:
        """Puts it into the state that this observation shows, where that is possible; its random numbers are seeded."""
        self.reset(seed)
        put(self.env, self.spec.name, np.asarray(obs, np.float64))

    def to_unit(self, action: Any) -> np.ndarray:
        """An action in the environment's own units as one in [-1, 1]."""
        flat = np.asarray(action, np.float64).reshape(-1)
        if flat.size != self.spec.act_size or not np.isfinite(flat).all():
            raise UserError(
                f"the policy for the first steps returned {action!r}, but {self.spec.act_size} finite numbers are "
                "needed."
            )
        return np.clip(to_unit(flat, self._low, self._high), -1.0, 1.0)

    def close(self) -> None:
        self.env.close()

    def _flat(self, obs: Any) -> np.ndarray:
        try:
            flat = flat_observation(self.env.observation_space, obs)
        except (LookupError, TypeError, ValueError) as problem:
            raise UserError(
                f"{self.spec.name} returned an observation that is not of its observation space: {problem!r}."
            ) from problem
        if flat.size != self.spec.obs_size:
            raise UserError(
                f"{self.spec.name} returned an observation of {flat.size} values in step {self._steps} of an episode; "
                f"{self.spec.obs_size} are needed."
            )
        if not np.isfinite(flat).all():
            wrong = np.flatnonzero(~np.isfinite(flat))
            named = ", ".join(f"{self.spec.obs_names[i]} is {flat[i]}" for i in wrong[:5])
            raise UserError(
                f"{self.spec.name} returned an observation that is not finite in step {self._steps} of an episode: "
                f"{named}{', ...' if len(wrong) > 5 else ''}."
            )
        return flat.copy()  # an environment may change its own array in place
