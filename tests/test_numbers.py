"""Numbers of the config as arguments of programs: the same arithmetic, no second compilation."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from doublehorizon import presets
from doublehorizon.algorithm import agent
from doublehorizon.algorithm.devices import Program
from doublehorizon.algorithm.numbers import NUMBERS, split_config
from doublehorizon.algorithm.types import Task, Transition
from doublehorizon.config import Config
from doublehorizon.config_json import changed
from worlds import TINY, budget

TASK = Task(3, 1, None, learns_termination=True)
OTHERS = {
    "policy.learning_rate": 0.01,
    "policy.discount": 0.9,
    "policy.target_entropy_per_action": -3.0,
    "fit.learning_rate": 0.01,
    "critic.target_rate": 0.5,
    "critic.bounds_rate": 0.25,
    "model.rollout_noise": 2.0,
    "model.reward_noise": 0.5,
    "terminator.learning_rate": 0.02,
    "terminator.sparsity": 0.3,
}
SET = changed(TINY, {"policy.discount": 0.95, "model.rollout_noise": 1.0})


def test_a_config_is_whole_again_and_its_rest_does_not_know_the_numbers():
    for config in (Config(), presets.paper, SET):
        whole = split_config(config).whole()
        for name in NUMBERS:
            group, field = name.split(".")
            before, after = (getattr(getattr(one, group), field) for one in (config, whole))
            assert (after is None) == (before is None) and (before is None or float(after) == np.float32(before))
        assert whole.model.width == config.model.width and config == changed(config, {})  # the first is as it was
    assert set(OTHERS) == set(NUMBERS)
    one, other = split_config(SET), split_config(changed(SET, OTHERS))
    assert one.rest == other.rest and hash(one.rest) == hash(other.rest)
    assert one.rest != split_config(changed(SET, {"policy.discount": None})).rest
    assert one.rest != split_config(changed(SET, {"policy.width": 7})).rest


@pytest.fixture(scope="module")
def begun() -> tuple:
    """A replay of 20 rows, one of which ended its episode, and an untrained agent."""
    obs = jr.normal(jr.key(1), (1, 20, 3))
    rows = Transition(obs, obs[..., :1], obs[..., 0], obs + 1.0, jnp.zeros((1, 20)).at[0, 3].set(1.0))
    state, empty = agent.untrained(SET, TASK, 40, jnp.array([0]))
    return agent.store((rows, state), empty)


def learnt(begun: tuple, config: Config, fit, improve) -> list[np.ndarray]:
    """What the agent learns in an iteration."""
    (replay, state), work = begun, budget(20)
    state, _ = fit(config, work, replay, state)
    state, _ = improve(config, TASK, 20, work, replay, state)
    return [np.asarray(x) for x in jax.tree.leaves((state.world, state.actor_critic))]


def counted(function) -> tuple[Program, list[int]]:
    """A program, and how often it was traced."""
    traced = []

    def body(*arguments):
        traced.append(1)
        return function._function(*arguments)

    return Program(body, "none"), traced


@pytest.fixture(scope="module")
def programs() -> tuple:
    return counted(agent.fit_model), counted(agent.improve_policy)


def test_other_numbers_compile_nothing_anew_and_change_what_is_learnt(programs, begun):
    (fit, fits), (improve, improvements) = programs
    first = learnt(begun, SET, fit, improve)
    for name, value in OTHERS.items():
        other = learnt(begun, changed(SET, {name: value}), fit, improve)
        assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True)), name
    assert (len(fits), len(improvements)) == (1, 1)
    for a, b in zip(first, learnt(begun, SET, fit, improve), strict=True):
        np.testing.assert_array_equal(a, b)
