"""Exploration is something a worker is given; noise with memory goes on exactly."""

import numpy as np

from doublehorizon.acting.env_runner import WorkerSpec
from doublehorizon.acting.exploration import EpisodeTime, exploration, white_noise
from doublehorizon.acting.policy import NumpyPolicy
from doublehorizon.acting.workers import WorkerPool
from doublehorizon.config import LoopConfig
from doublehorizon.envs.make import describe, factory, make

SPEC = describe(make("Pendulum-v1"))


def drifting(rng: np.random.Generator, act_size: int, time: EpisodeTime) -> np.ndarray:
    """A wave along the episode, another one in every episode."""
    assert time.time_limit == 200
    return np.full(act_size, np.sin(0.1 * time.t + time.reset_seed % 7), np.float32)


def policy() -> NumpyPolicy:
    rng = np.random.default_rng(0)
    weights, zero, one = rng.normal(size=(3, 2)).astype(np.float32), np.zeros(1, np.float32), np.ones(1, np.float32)
    return NumpyPolicy(
        (weights,), (np.zeros(2, np.float32),), np.zeros(3, np.float32), np.ones(3, np.float32), -one, one + zero
    )


def pool(episodes=None) -> WorkerPool:
    return WorkerPool(WorkerSpec(factory("Pendulum-v1"), SPEC, exploration=drifting), [3], episodes=episodes)


def test_noise_with_memory_goes_on_in_another_pool():
    with pool() as whole:
        expected = whole.collect([policy()], 60)
        seed = whole.episodes[3, 0].reset_seed
    for t in range(60):
        noise = drifting(np.random.default_rng(), 1, EpisodeTime(seed, t, 200))
        np.testing.assert_array_equal(expected["act"][0, t], policy().act(expected["obs"][0, t], noise))
    with pool() as first:
        begun = first.collect([policy()], 25)
    with pool(first.episodes) as second:
        rest = second.collect([policy()], 35, step=25)
        assert second.pop_notes() == []
    for name, value in expected.items():
        np.testing.assert_array_equal(np.concatenate([begun[name], rest[name]], axis=1), value)


def test_white_noise_is_the_generators():
    time = EpisodeTime(1, 0, 200)
    noise = white_noise(np.random.default_rng(7), 3, time)
    np.testing.assert_array_equal(noise, np.random.default_rng(7).standard_normal(3, np.float32))
    assert exploration(LoopConfig()) is white_noise
