"""Observation spaces of every kind, a policy for each, and what does not fit them."""

from collections import OrderedDict
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector.utils import concatenate, create_empty_array

from doublehorizon.acting.policy import NumpyPolicy
from doublehorizon.envs.spaces import layout
from worlds import TINY

TANKS = spaces.Dict(levels=Box(0, 2, (2,)), wanted=Box(0, 2, (1,)))
SPACES = {
    "square": Box(-1, 1, (2, 3)),
    "scalar": Box(-1, 1, ()),
    "whole numbers": spaces.Dict(a=Box(-9, 9, (2,), np.int64), b=Box(-1, 1, (1,), np.float64)),
    "discrete": Discrete(4, start=-2),
    "multidiscrete": MultiDiscrete([3, 2, 4], start=[0, -1, 5]),
    "square multidiscrete": MultiDiscrete([[3, 2], [4, 5]]),
    "multibinary": MultiBinary((2, 2)),
    "tanks": TANKS,
    "unsorted": spaces.Dict(OrderedDict(wanted=Box(0, 2, (1,)), levels=Box(0, 2, (2,)))),
    "tuple": spaces.Tuple([Discrete(3), Box(-1, 1, (2, 1)), Box(-1, 1, ())]),
    "nested": spaces.Dict(
        arm=spaces.Dict(joints=Box(-1, 1, (2, 2)), grip=Discrete(2)),
        feet=spaces.Tuple([MultiBinary(2), spaces.Dict(mode=MultiDiscrete([2, 3], start=[1, 1]))]),
        yaw=Box(-1, 1, (1,)),
    ),
}
LIMITED = replace(TINY, termination="never", loop=replace(TINY.loop, time_limit=10))
ACTION = Box(np.array([1.0, -3.0], np.float32), np.array([5.0, -1.0], np.float32))


def random_policy(space: gym.Space, action: Box = ACTION) -> NumpyPolicy:
    """A policy in whose actions every number of the observation counts differently."""
    rng, size, act_size = np.random.default_rng(0), spaces.flatdim(space), int(np.prod(action.shape))
    numbers = lambda *shape: rng.normal(0.0, 0.4, shape).astype(np.float32)  # noqa: E731
    return NumpyPolicy(
        (numbers(size, 8), numbers(8, 2 * act_size)),
        (numbers(8), numbers(2 * act_size)),
        numbers(size),
        1.0 + np.abs(numbers(size)),
        action.low.ravel(),
        action.high.ravel(),
        layout(space, action),
    )


def samples(space: gym.Space, count: int = 5) -> list:
    space.seed(0)
    return [space.sample() for _ in range(count)]


def batched(space: gym.Space, observations: list):
    """As vectorised environments stack them."""
    return concatenate(space, observations, create_empty_array(space, len(observations)))


def leaves(observation, path=()) -> dict:
    """Entries by their dotted names."""
    if isinstance(observation, dict | tuple):
        keys = observation if isinstance(observation, dict) else range(len(observation))
        return {name: leaf for key in keys for name, leaf in leaves(observation[key], (*path, key)).items()}
    return {".".join(map(str, ("observation", *path))): observation}


every_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())

LEVELS, WANTED = np.zeros(2, np.float32), np.zeros(1, np.float32)
REFUSED = {
    "a vector": (TANKS, np.zeros(3), ["array", "(3,)", "dict: levels (2), wanted (1)"]),
    "a list of numbers": (TANKS, [0.0, 0.0, 0.0], ["list of 3", "dict: levels (2), wanted (1)"]),
    "a key missing": (TANKS, {"levels": LEVELS}, ["no entry 'wanted'", "dict of levels,", "wanted (1)"]),
    "a key misspelt": (
        TANKS,
        {"level": LEVELS, "wanted": WANTED},
        ["no entry 'levels'", "level, wanted", "levels (2)"],
    ),
    "a key too many": (TANKS, {"levels": LEVELS, "wanted": WANTED, "flow": 1.0}, ["unknown entry 'flow'"]),
    "a wrong shape": (TANKS, {"levels": np.zeros(3), "wanted": WANTED}, ["levels", "(3,)", "(2,)"]),
    "too few axes": (TANKS, {"levels": LEVELS, "wanted": 1.0}, ["wanted", "()", "(1,)"]),
    "two batches": (TANKS, {"levels": np.zeros((4, 2)), "wanted": np.zeros((3, 1))}, ["wanted", "(3,)", "(4,)"]),
    "half a batch": (TANKS, {"levels": np.zeros((4, 2)), "wanted": WANTED}, ["wanted", "()", "(4,)"]),
    "nothing measured": (TANKS, {"levels": LEVELS, "wanted": [None]}, ["wanted", "list of 1", "numbers"]),
    "unequal rows": (TANKS, {"levels": [[1.0], [1.0, 2.0]], "wanted": WANTED}, ["levels", "list of 2", "numbers"]),
    "a dict for a tuple": (SPACES["tuple"], {"0": 1}, ["dict of 0", "needs a tuple"]),
    "too long a tuple": (SPACES["tuple"], (0, 1, 2, 3), ["tuple of 4", "unknown entry 3"]),
    "too short a tuple": (SPACES["tuple"], (0,), ["tuple of 1", "no entry 1"]),
    "an array for a tuple": (SPACES["tuple"], np.zeros(3), ["array", "needs a tuple"]),
    "a wrong value": (SPACES["discrete"], 2, ["[2]", "-2 to 1"]),
    "a fraction": (SPACES["discrete"], 0.5, ["[0.5]", "-2 to 1"]),
    "a wrong value in a batch": (SPACES["multidiscrete"], [[0, 0, 5], [0, 1, 6]], ["[0, 1, 6]", "-1 to 0, 5 to 8"]),
    "a flat box": (SPACES["square"], np.zeros(6), ["(6,)", "(2, 3)"]),
    "something nested": (
        SPACES["nested"],
        {"arm": {"joints": np.zeros((2, 2)), "grip": 1}, "feet": (np.zeros(2), [1, 1]), "yaw": [0.0]},
        ["observation's feet.1 is a list of 2", "dict"],
    ),
}
refused = pytest.mark.parametrize(("space", "seen", "words"), REFUSED.values(), ids=REFUSED.keys())
