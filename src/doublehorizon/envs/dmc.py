"""DeepMind's control suite as Gymnasium environments: `dmc/cheetah-run`, or `cheetah-run`, or Shimmy's
`dm_control/cheetah-run-v0`. Importing this module does not import dm_control."""

import difflib
import os
import re
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from doublehorizon.envs.termination import never, regulator
from doublehorizon.errors import UserError

ACTION_REPEAT = 2  # the paper's, for every task of the suite

_MAX_STEPS = 1000  # control steps of an episode where the suite sets no limit, as it does everywhere else
_OTHER_NAMES = {"cup": "ball_in_cup"}
_DOMAINS = (
    *("acrobot", "ball_in_cup", "cartpole", "cheetah", "cup", "dog", "finger", "fish", "hopper", "humanoid"),
    *("humanoid_CMU", "lqr", "manipulator", "pendulum", "point_mass", "quadruped", "reacher", "stacker", "swimmer"),
    "walker",
)


def find_task(name: str) -> tuple[str, str] | None:
    """Domain and task that `name` stands for; None where it is no name of a control task. A prefixed name of one that
    does not exist is a mistake."""
    found = re.fullmatch(r"(dmc/|dm_control/)?([A-Za-z0-9_]+)-([A-Za-z0-9_]+?)(-v\d+)?", name)
    if found is None:
        return None
    prefix, domain, task, version = found.groups()
    if prefix is None and (version is not None or domain not in _DOMAINS or re.fullmatch(r"v\d+", task)):
        return None  # a Gymnasium id such as Hopper-v5, perhaps in small letters
    domain = _OTHER_NAMES.get(domain, domain)
    tasks = _suite(name).ALL_TASKS
    if (domain, task) in tasks:
        return domain, task
    known = [f"dmc/{a}-{b}" for a, b in tasks]
    near = difflib.get_close_matches(f"dmc/{domain}-{task}", known, n=3, cutoff=0.5) or known[:3]
    raise UserError(f"there is no control task {name!r}. The nearest are: {', '.join(near)}.")


def _suite(name: str) -> Any:
    blind = not any(os.environ.get(variable) for variable in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"))
    if blind:
        os.environ["MUJOCO_GL"] = "disabled"  # without a display the suite's import would complain
    try:
        from dm_control import suite  # type: ignore[import-not-found]
    except ImportError as problem:
        raise UserError(
            f"{name!r} names a task of DeepMind's control suite, which is not installed. Install it with "
            "pip install 'doublehorizon[dmc]' && pip install --no-deps dm_control."
        ) from problem
    finally:
        if blind:
            del os.environ["MUJOCO_GL"]  # others may draw without a display
    return suite


class ControlSuite(gym.Env):
    """A task of the suite: observations concatenated in the order of its specification, rewards in [0, 1]."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 (Gymnasium's interface)

    def __init__(self, domain: str, task: str, max_steps: int | None = None, render_mode: str | None = None):
        self._env = _suite(f"dmc/{domain}-{task}").load(domain, task, task_kwargs={"random": 0})
        self.render_mode = render_mode
        self.is_terminal = regulator if domain == "lqr" else never  # of the whole suite only this one ends
        own = self._env._step_limit
        self.max_steps = max_steps or (int(own) if np.isfinite(own) else _MAX_STEPS)
        self._env._step_limit = self.max_steps
        self.metadata = {**type(self).metadata, "render_fps": round(1.0 / self._env.control_timestep())}
        size = sum(int(np.prod(part.shape)) for part in self._env.observation_spec().values())
        self.observation_space = Box(-np.inf, np.inf, (size,), np.float32)
        action = self._env.action_spec()
        self.action_space = Box(action.minimum.astype(np.float32), action.maximum.astype(np.float32), dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed, options=options)
        if seed is not None:
            self._env.task._random = np.random.RandomState(seed)  # the suite takes a seed only when a task is made
        return self._observe(self._env.reset()), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        step = self._env.step(action)
        terminated = bool(step.last() and step.discount == 0.0)
        return self._observe(step), float(step.reward or 0.0), terminated, step.last() and not terminated, {}

    def render(self) -> np.ndarray:
        return self._env.physics.render(height=240, width=320, camera_id=0)

    def close(self) -> None:
        self._env.close()

    def _observe(self, step: Any) -> np.ndarray:
        return np.concatenate([np.ravel(part) for part in step.observation.values()]).astype(np.float32)
