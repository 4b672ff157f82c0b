"""Real episodes from a given state, whose returns are known by hand, and how an environment is put there."""

from dataclasses import replace

import gymnasium as gym
import jax.numpy as jnp
import numpy as np
import pytest

import doublehorizon as dh
from doublehorizon.acting.env_runner import EnvRunner, MonteCarloSpec, WorkerSpec
from doublehorizon.acting.policy import NumpyPolicy
from doublehorizon.acting.workers import WorkerPool
from doublehorizon.algorithm.types import Transition
from doublehorizon.analysis import critic_error
from doublehorizon.config_json import changed
from doublehorizon.envs.make import Simulator, describe, factory, make
from worlds import TINY


class Track(gym.Env):
    """Moves by the action, pays the new position, ends beyond 2; may be put anywhere."""

    observation_space = gym.spaces.Box(-10, 10, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    spec = None

    def set_observation(self, obs):
        self.position = float(obs[0])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = 0.0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.position += float(action[0])
        return np.array([self.position], np.float32), self.position, self.position > 2, False, {}


def steady(speed: float) -> NumpyPolicy:
    """A linear policy that always goes at this speed, with hardly any chance."""
    weight, bias = np.zeros((1, 2), np.float32), np.array([np.arctanh(speed), -20.0], np.float32)
    one = np.ones(1, np.float32)
    return NumpyPolicy((weight,), (bias,), 0 * one, one, -one, one)


def test_real_returns_by_hand():
    config = changed(TINY, {"loop.time_limit": 3})
    env = factory(Track, config.loop)
    spec = describe(env(), config)
    runner = EnvRunner(Simulator(env(), spec), 0)
    how = MonteCarloSpec(episodes=2, horizon=4, discount=0.5, temperature=0.0)
    obs, act = np.array([[0.0], [1.9]], np.float32), np.array([[0.25], [0.5]], np.float32)
    found = runner.monte_carlo_returns(0, steady(0.5), list(zip(obs, act, strict=True)), how)
    # 0.25, 0.75, 1.25, 1.75: the time limit of 3 does not cut it off; the other one ends at once
    hand = 0.25 + 0.5 * 0.75 + 0.25 * 1.25 + 0.125 * 1.75
    np.testing.assert_allclose(found, [[hand, hand], [2.4, 2.4]], rtol=1e-3)
    soft = runner.monte_carlo_returns(0, steady(0.5), [(obs[0], act[0])], replace(how, temperature=1.0))
    assert soft[0, 0] < hand - 5  # a policy without entropy pays for it
    pairs = Transition(*(jnp.asarray(x) for x in (obs, act, obs[:, 0], obs, obs[:, 0])))
    with WorkerPool(WorkerSpec(env, spec), [0, 1]) as pool:
        np.testing.assert_allclose(critic_error.true_values(pool, steady(0.5), pairs, how), [hand, 2.4], rtol=1e-3)


class Windy(Track):
    """Pays by chance."""

    def step(self, action):
        return np.zeros(1, np.float32), float(self.np_random.normal()), False, False, {}


@pytest.mark.parametrize("repeat", [1, 2])
def test_real_returns_have_the_environment_s_own_chance_and_go_on_beyond_its_time_limit(repeat):
    config = changed(TINY, {"loop.time_limit": 3, "loop.action_repeat": repeat})
    pair = [(np.zeros(1, np.float32), np.zeros(1, np.float32))]
    env = factory(Windy, config.loop)
    runner = EnvRunner(Simulator(env(), describe(env(), config)), 0)
    found = runner.monte_carlo_returns(0, steady(0.5), pair * 2, MonteCarloSpec(3, 4, 0.5, 0.0))
    assert len(set(found.ravel().tolist())) == 6
    limited = factory(lambda: gym.wrappers.TimeLimit(Track(), 3), config.loop)
    runner = EnvRunner(Simulator(limited(), describe(limited(), config)), 0)
    start = [(np.full(1, 1.0, np.float32), np.zeros(1, np.float32))]
    still = runner.monte_carlo_returns(0, steady(1e-6), start, MonteCarloSpec(1, 10, 1.0, 0.0))
    np.testing.assert_allclose(still, 10.0 * repeat, rtol=1e-3)


def test_a_sampled_action_has_the_density_that_is_told():
    rng = np.random.default_rng(0)
    weight, bias = np.zeros((1, 2), np.float32), np.array([0.3, 0.2], np.float32)
    policy = NumpyPolicy((weight,), (bias,), *(np.full(1, value) for value in (0.0, 1.0, -1.0, 1.0)))
    act, log_prob = policy.sample(np.zeros((200_000, 1)), rng)
    density, edges = np.histogram(act[:, 0], bins=20, range=(-0.9, 0.9))
    width = edges[1] - edges[0]
    middle = np.searchsorted(edges, act[:, 0]) - 1
    for k in range(4, 16):
        told = np.exp(log_prob[middle == k]).mean()
        assert density[k] / len(act) / width == pytest.approx(told, rel=0.05)


@pytest.mark.parametrize("name", ["Pendulum-v1", "paper/Hopper", "paper/Ant", "InvertedPendulum-v5"])
def test_environments_are_put_where_an_observation_was_made(name):
    env, twin = (Simulator(e, describe(e)) for e in (make(name), make(name)))
    rng = np.random.default_rng(0)
    obs = env.reset(3)
    for _ in range(3):
        obs, *_ = env.step(rng.uniform(-1, 1, env.spec.act_size))
    twin.put(obs, seed=4)
    act = rng.uniform(-1, 1, env.spec.act_size)
    (next_obs, reward, *_), (same_obs, same_reward, *_) = env.step(act), twin.step(act)
    np.testing.assert_allclose(next_obs, same_obs, atol=5e-3)
    assert reward == pytest.approx(same_reward, abs=2e-2)


def test_an_environment_that_cannot_be_put_says_so():
    env = make("InvertedDoublePendulum-v5")
    simulator = Simulator(env, describe(env))
    with pytest.raises(dh.UserError, match="set_observation"):
        simulator.put(simulator.reset(0), seed=0)


def test_horizons_for_real_returns():
    assert critic_error.horizon_for(0.995) == 919 and critic_error.horizon_for(0.5) == 7
