"""Gymnasium's own checks of an environment, their complaints as single lines."""

import math
import re
import traceback
import warnings
from typing import Any

import gymnasium as gym
from gymnasium.utils.env_checker import check_env

from doublehorizon.errors import UserError

_NO_MATTER_HERE = (
    "different from the unwrapped version",  # wrappers are welcome
    "symmetric and normalized space",  # actions are rescaled in any case
    "Box observation space m",  # bounds of observations are not used
)


def complaints(env: gym.Env, name: str) -> list[str]:
    """Runs Gymnasium's `check_env`, which resets the environment and steps it a few times. What it refuses is a
    mistake; what it only warns of comes back as lines."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _require_finite_reward(env, name)
            check_env(env, skip_render_check=True, skip_close_check=True)
        except UserError:
            raise
        except Exception as problem:  # its assertions, or whatever the environment raises
            place = traceback.extract_tb(problem.__traceback__)[-1]
            raised = f"{type(problem).__name__}: {problem} ({place.filename}, line {place.lineno})"
            message = str(problem) if isinstance(problem, AssertionError) else raised
            raise UserError(
                f"{name} does not pass Gymnasium's check_env: {_one_line(message)} Mend it, or train without the check "
                "(--no-check, in Python check=False)."
            ) from problem
    lines = [_one_line(str(warning.message)) for warning in caught]
    return [f"note: {line}" for line in dict.fromkeys(lines) if not any(phrase in line for phrase in _NO_MATTER_HERE)]


def _require_finite_reward(env: gym.Env, name: str) -> None:
    """Gymnasium would say that such a reward is not the same twice."""
    env.reset(seed=0)
    found = env.step(env.action_space.sample())
    reward: Any = found[1]
    if isinstance(reward, float | int) and not math.isfinite(reward):
        raise UserError(f"{name} returned the reward {reward} in its first step; finite numbers are needed.")


def _one_line(message: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", message)
    line = " ".join(re.sub(r"^(WARN|ERROR): ", "", plain).split())
    return line if line.endswith((".", "!", "?")) else line + "."


def is_users_own(env: gym.Env) -> bool:
    """Whether it, or one of its wrappers, comes neither from Gymnasium nor from here."""
    layers: list[Any] = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    return any(type(layer).__module__.split(".")[0] not in ("gymnasium", "doublehorizon") for layer in layers)
