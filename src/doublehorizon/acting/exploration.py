"""Exploration: the noise with which actions are sampled while experience is collected. One place decides on it.

Noise may have memory. It is exact on resume if it depends on nothing but its arguments: an episode that goes on in
another process has the same reset seed there, and counts the same steps.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from doublehorizon.config import LoopConfig


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


def exploration(loop: LoopConfig) -> Exploration:
    """The action noise of a run, which its workers are given."""
    del loop  # there is one kind
    return white_noise
