"""Exploration: the random actions before the first fit, and the noise with which actions are sampled afterwards. One
place decides on both.

Noise may have memory. It is exact on resume if it depends on nothing but its arguments: an episode that goes on in
another process has the same reset seed there, and counts the same steps.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from doublehorizon.config import LoopConfig
from doublehorizon.envs.make import EnvSpec


class EpisodeTime(NamedTuple):
    """Which episode, by the seed of its reset, and how many steps of it are done; of at most `time_limit`."""

    reset_seed: int
    t: int
    time_limit: int


Exploration = Callable[[np.random.Generator, int, EpisodeTime], np.ndarray]
"""From a generator, the number of actions and the time to standard normal noise `[act]`. The generator is seeded anew
by where the run stands, each time that steps are collected."""


def white_noise(rng: np.random.Generator, act_size: int, time: EpisodeTime) -> np.ndarray:
    """Independent in every step: samples of the policy itself."""
    del time
    return rng.standard_normal(act_size, np.float32)


FirstActions = Exploration
"""The same to random actions in [-1, 1]."""

_LONGEST_HOLD = 30  # steps
_CHUNK = 1000  # steps whose actions are drawn at once
_IS_RANDOM = 2**20  # after all chunks: what is drawn for the whole episode


def independent_actions(rng: np.random.Generator, act_size: int, time: EpisodeTime) -> np.ndarray:
    """Uniform, and new in every step."""
    del time
    return rng.uniform(-1, 1, act_size)


def held_actions(rng: np.random.Generator, act_size: int, time: EpisodeTime) -> np.ndarray:
    """Uniform, each held for a random number of steps, short or long, as nobody knows on what scale of time something
    happens. Where actions are new in every step, their effects average out: a car in a valley never leaves it."""
    del rng
    chunk, place = divmod(time.t, _CHUNK)
    return _held_actions(time.reset_seed, act_size, chunk)[place]


@lru_cache(maxsize=16)
def _held_actions(reset_seed: int, act_size: int, chunk: int) -> np.ndarray:
    """Of one chunk of an episode, `[step, act]`. The logarithm of the number of steps is uniform."""
    rng = np.random.default_rng([reset_seed, chunk])

    def one_number() -> np.ndarray:
        steps = np.exp(rng.uniform(0.0, np.log(_LONGEST_HOLD), _CHUNK)).astype(int)
        return np.repeat(rng.uniform(-1, 1, _CHUNK), steps)[:_CHUNK]

    return np.stack([one_number() for _ in range(act_size)], axis=1)


def first_actions(loop: LoopConfig) -> FirstActions:
    """The actions of a run before its first fit, which its workers are given."""
    return {"held": held_actions, "independent": independent_actions}[loop.first_actions]


def is_random_episode(reset_seed: int, step: int, spec: EnvSpec) -> bool:
    """Whether an episode that begins at this step of the run is random like the first ones: about the k-th of full
    length with probability 1/k, so that there are ever fewer, and always another one. What random actions find only by
    luck is found even if the first ones did not."""
    episodes = step / (spec.time_limit * spec.action_repeat)
    return bool(np.random.default_rng([reset_seed, _IS_RANDOM]).random() * max(episodes, 2.0) < 1.0)


def exploration(loop: LoopConfig) -> Exploration:
    """The action noise of a run, which its workers are given."""
    del loop  # there is one kind
    return white_noise
