"""Going on in another environment: after load, and by set_env."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import doublehorizon as dh
from doublehorizon.envs.env_source import _refuse_vectors
from worlds import TINY

WITH_OPTIONS = "Pendulum-v1 was made with options"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("agent") / "agent"
    dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY).learn(60).save(path)
    return path


def gravity(model: dh.DHMBPO) -> float:
    env: Any = model.get_env().unwrapped
    return env.g


def test_an_agent_is_loaded_into_the_same_environment_with_options(saved):
    model = dh.DHMBPO.load(saved, env=lambda: gym.make("Pendulum-v1", g=8.0))
    with pytest.warns(UserWarning, match=WITH_OPTIONS):
        model.learn(20)
    assert model.num_timesteps == 80 and model.spec.termination == "known" and gravity(model) == 8.0


def test_an_agent_moves_to_another_environment_and_keeps_what_it_learnt(saved):
    model = dh.DHMBPO.load(saved)
    before = model.policies[0]
    model.set_env(lambda: gym.make("Pendulum-v1", g=20.0))
    np.testing.assert_array_equal(model.policies[0].weights[0], before.weights[0])
    assert model.progress is not None and model.progress.state.episodes == {}
    with pytest.warns(UserWarning, match=WITH_OPTIONS):
        model.learn(20)
    assert model.num_timesteps == 80 and gravity(model) == 20.0
    with pytest.raises(dh.UserError, match="was trained with obs_size 3, but MountainCarContinuous-v0 has 2"):
        model.set_env("MountainCarContinuous-v0")
    assert gravity(model) == 20.0


def test_before_it_has_learnt_any_environment_may_be_set():
    model = dh.DHMBPO("Pendulum-v1", config=TINY)
    model.set_env("MountainCarContinuous-v0")
    assert model.spec.obs_size == 2 and model.spec.name == "MountainCarContinuous-v0"


def test_a_config_is_given_by_the_name_of_its_preset():
    assert dh.DHMBPO("Pendulum-v1", config="quick").config == dh.presets.quick
    with pytest.raises(dh.UserError, match="'quik'"):
        dh.DHMBPO("Pendulum-v1", config="quik")


def test_agents_and_policies_say_what_they_are(saved):
    model = dh.DHMBPO.load(saved)
    assert repr(model).startswith("DHMBPO('Pendulum-v1', seeds [0, 1], 60 steps, last test returns {0: -")
    assert repr(model.policies[0]) == "NumpyPolicy(3 -> 16 -> 16 -> 16 -> 1, actions within [-2, 2])"
    assert "last test returns none yet" in repr(dh.DHMBPO("Pendulum-v1", config=TINY))


def test_several_environments_in_one_are_refused_with_what_to_do():
    vectors: Any = gym.make_vec("Pendulum-v1", num_envs=3)
    with pytest.raises(dh.UserError, match=r"holds 3 environments.*loop\.num_envs = 3"):
        dh.DHMBPO(lambda: vectors, config=TINY)
    with pytest.raises(dh.UserError, match="holds 3 environments"):
        _refuse_vectors(vectors)
    vectors.close()
