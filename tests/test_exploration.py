"""Exploration is something a worker is given; noise with memory goes on exactly."""

import numpy as np
import pytest

from doublehorizon.acting.env_runner import WorkerSpec
from doublehorizon.acting.exploration import (
    EpisodeTime,
    exploration,
    first_actions,
    held_actions,
    independent_actions,
    is_random_episode,
    white_noise,
)
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


def test_first_actions_are_held_for_short_and_long():
    rng = np.random.default_rng(0)
    acts = np.array([held_actions(rng, 2, EpisodeTime(5, t, 3000)) for t in range(2500)])
    assert rng.bit_generator.state == np.random.default_rng(0).bit_generator.state  # it depends on its arguments alone
    assert acts.shape == (2500, 2) and np.abs(acts).max() <= 1 and acts.min() < -0.9 and acts.max() > 0.9
    for column in acts.T:
        changes = np.flatnonzero(np.diff(column))
        lengths = np.diff(changes)
        assert lengths.min() == 1 and 15 <= lengths.max() <= 29
        assert np.mean(lengths) == pytest.approx(29 / np.log(30) - 0.5, rel=0.3)  # of a log-uniform number, cut off
    assert not np.array_equal(acts[:, 0], acts[:, 1])
    other = np.array([held_actions(rng, 2, EpisodeTime(6, t, 3000)) for t in range(100)])
    assert not np.array_equal(acts[:100], other)  # another episode


def test_the_config_chooses_the_first_actions():
    assert first_actions(LoopConfig()) is independent_actions
    assert first_actions(LoopConfig(first_actions="held")) is held_actions
    found = independent_actions(np.random.default_rng(7), 3, EpisodeTime(1, 0, 200))
    np.testing.assert_array_equal(found, np.random.default_rng(7).uniform(-1, 1, 3))


def test_random_episodes_become_rare_but_never_end():
    def share(step: int) -> float:
        return float(np.mean([is_random_episode(seed, step, SPEC) for seed in range(4000)]))

    assert SPEC.time_limit == 200
    assert share(400) == share(100) == pytest.approx(0.5, abs=0.03)  # one in two at most
    assert share(2000) == pytest.approx(0.1, abs=0.02)
    assert share(20_000) == pytest.approx(0.01, abs=0.006)


def worker_spec(random_episodes: bool = True) -> WorkerSpec:
    return WorkerSpec(factory("Pendulum-v1"), SPEC, first_actions=held_actions, random_episodes=random_episodes)


def is_held(acts: np.ndarray) -> bool:
    return bool(np.mean(np.diff(acts) == 0) > 0.5)


def test_a_random_episode_is_random_to_its_end_and_the_next_one_may_not_be():
    acts = []
    for random_episodes in (True, False):
        with WorkerPool(worker_spec(random_episodes), [3]) as workers:
            acts.append(workers.collect([policy()], 1200, step=400)["act"][0, :, 0].reshape(6, 200))
    held, none = ([is_held(episode) for episode in episodes] for episodes in acts)
    assert 0 < sum(held) < 6 and not any(none)
    np.testing.assert_array_equal(acts[0][: held.index(True)], acts[1][: held.index(True)])


def test_a_random_episode_goes_on_in_another_pool():
    with WorkerPool(worker_spec(), [3]) as workers:
        expected = workers.collect([policy()], 1200, step=400)["act"]
    at = 200 * int(np.argmax([is_held(episode) for episode in expected[0, :, 0].reshape(6, 200)])) + 50
    with WorkerPool(worker_spec(), [3]) as workers:
        begun = workers.collect([policy()], at, step=400)["act"]
    assert workers.episodes[3, 0].is_random
    with WorkerPool(worker_spec(), [3], episodes=workers.episodes) as workers:
        rest = workers.collect([policy()], 150, step=400 + at)["act"]
    np.testing.assert_array_equal(np.concatenate([begun, rest], axis=1), expected[:, : at + 150])
