"""Puts an environment into the state that an observation shows, where that is possible."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.continuous_mountain_car import Continuous_MountainCarEnv
from gymnasium.envs.classic_control.pendulum import PendulumEnv
from gymnasium.envs.mujoco import MujocoEnv

from doublehorizon.errors import UserError

_TOLERANCE = 1e-4  # relative: observations are kept in float32


def put(env: gym.Env, name: str, obs: np.ndarray) -> None:
    """After it, the environment shows this observation; it must have been reset before. Environments of one's own have
    a method `set_observation(obs)` for it."""
    inner: Any = env.unwrapped
    if hasattr(inner, "set_observation"):
        inner.set_observation(obs)
        return
    if isinstance(inner, PendulumEnv):
        inner.state = np.array([np.arctan2(obs[1], obs[0]), obs[2]])
        seen = inner._get_obs()
    elif isinstance(inner, Continuous_MountainCarEnv):
        inner.state = seen = np.array(obs, np.float32)
    elif isinstance(inner, MujocoEnv):
        seen = _put_mujoco(inner, obs)
    else:
        seen = None
    if seen is None or np.shape(seen) != np.shape(obs) or not np.allclose(seen, obs, _TOLERANCE, _TOLERANCE):
        raise UserError(
            f"{name} cannot be put into the state that an observation shows, as its observations do not tell all of "
            "it, or not in a way that is known here. Give the environment a method set_observation(obs)."
        )


def _put_mujoco(inner: Any, obs: np.ndarray) -> np.ndarray | None:
    """Most of Gymnasium's tasks observe positions, but for the first one or two, where the robot is, and velocities."""
    unseen = inner.model.nq + inner.model.nv - obs.size
    if not 0 <= unseen <= 2:
        return None
    position, velocity = np.split(np.concatenate([np.zeros(unseen), obs]), [inner.model.nq])
    inner.set_state(position, velocity)
    observe = getattr(inner, "_get_obs", None) or getattr(inner, "_observe", None)
    return None if observe is None else np.asarray(observe())
