"""Observation and action spaces as flat vectors, or one line that says why not."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from doublehorizon.errors import UserError

_MOST_NUMBERS = 10_000  # in an observation: beyond, it is an image or the like, and no state


def observation_size(name: str, space: gym.Space) -> int:
    """Numbers in a flat observation. Dicts and tuples are laid out one part after the other, a discrete value as a
    one-hot vector."""
    for part in _parts(space):
        is_image = isinstance(part, spaces.Box) and part.dtype == np.uint8 and len(part.shape) >= 2
        if is_image or (part.is_np_flattenable and spaces.flatdim(part) > _MOST_NUMBERS):
            raise UserError(
                f"{name} observes images {part.shape}, but DHMBPO learns from state vectors. Use an environment that "
                "observes its state, or wrap it with an encoder of your own."
            )
    if not space.is_np_flattenable:
        raise UserError(
            f"{name} has the observation space {space}, which cannot be laid out as one vector. Use a Box, or a Dict "
            "or Tuple of boxes."
        )
    size = int(spaces.flatdim(space))
    if size == 0:
        raise UserError(f"{name} observes nothing ({space}), but at least one number is needed.")
    return size


def flat_observation(space: gym.Space, obs: Any) -> np.ndarray:
    """An observation as a vector of float32."""
    if isinstance(space, spaces.Box):
        return np.asarray(obs, np.float32).reshape(-1)
    return np.asarray(spaces.flatten(space, obs), np.float32)


def flat_observations(space: gym.Space, obs: Any) -> np.ndarray:
    """The same for one observation or, where the space is a Box, for a batch of them."""
    if isinstance(space, spaces.Box):
        array = np.asarray(obs, np.float32)
        lead = array.shape[: array.ndim - len(space.shape)]
        if array.shape[len(lead) :] == space.shape:
            return array.reshape(*lead, -1)
        raise UserError(f"the observation has the shape {array.shape}, but this policy needs (..., *{space.shape}).")
    return flat_observation(space, obs)


def action_box(name: str, space: gym.Space) -> spaces.Box:
    """The action space, if its actions are continuous and bounded."""
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise UserError(
            f"{name} has the action space {space}, but DHMBPO needs continuous actions (a Box of floats). For discrete "
            "actions use an algorithm such as DQN or PPO."
        )
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise UserError(
            f"{name} has an action space without bounds, {space}, but actions are scaled to them. Wrap it so that "
            "`action_space` is a Box with finite low and high, e.g. with gymnasium.wrappers.TransformAction."
        )
    if space.low.size == 0 or not (space.low < space.high).all():
        raise UserError(f"{name} has an action space without room, {space}: every low must be below its high.")
    return space


def _parts(space: gym.Space) -> list[gym.Space]:
    if isinstance(space, spaces.Dict):
        return [part for one in space.spaces.values() for part in _parts(one)]
    if isinstance(space, spaces.Tuple):
        return [part for one in space.spaces for part in _parts(one)]
    return [space]
