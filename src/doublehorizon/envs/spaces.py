"""Observation and action spaces as flat vectors, or one line that says why not."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from doublehorizon.envs.obs_layout import ObsEntry, ObsLayout, Path
from doublehorizon.errors import UserError

_MOST_NUMBERS = 10_000  # in an observation: beyond, it is an image or the like, and no state


def observation_size(name: str, space: gym.Space) -> int:
    """Numbers in a flat observation. Dicts and tuples are laid out one part after the other, a discrete value as a
    one-hot vector."""
    for _, part in _leaves(space):
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


def layout(observation_space: gym.Space, action_space: gym.Space) -> ObsLayout | None:
    """How observations are laid out, in the order of Gymnasium's `flatten`. None where an observation is a vector and
    so is an action, and where it has a part that only Gymnasium can lay out."""
    shape, act_shape = observation_space.shape, action_space.shape or ()
    if isinstance(observation_space, spaces.Box) and len(shape or ()) == len(act_shape) == 1:
        return None
    leaves = _leaves(observation_space)
    if not all(isinstance(leaf, _KINDS) for _, leaf in leaves):
        return None
    return ObsLayout(tuple(_entry(path, leaf) for path, leaf in leaves), act_shape)


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


_KINDS = (spaces.Box, spaces.MultiBinary, spaces.Discrete, spaces.MultiDiscrete)


def _leaves(space: gym.Space, path: Path = ()) -> list[tuple[Path, gym.Space]]:
    """The parts of a space that have no parts themselves, and where they are found. A dict whose keys are no names is
    one part."""
    if isinstance(space, spaces.Dict) and space.spaces and all(isinstance(key, str) for key in space.spaces):
        parts = space.spaces.items()
    elif isinstance(space, spaces.Tuple) and space.spaces:
        parts = enumerate(space.spaces)
    else:
        return [(path, space)]
    return [leaf for key, part in parts for leaf in _leaves(part, (*path, key))]


def _entry(path: Path, leaf: gym.Space) -> ObsEntry:
    if isinstance(leaf, spaces.Discrete):
        return ObsEntry(path, (), (int(leaf.n),), (int(leaf.start),))
    if isinstance(leaf, spaces.MultiDiscrete):
        return ObsEntry(path, leaf.shape, tuple(leaf.nvec.ravel().tolist()), tuple(leaf.start.ravel().tolist()))
    return ObsEntry(path, leaf.shape or ())
