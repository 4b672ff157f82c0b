"""Rewards of terminating steps: learnt apart from the others, whether a termination rule is known or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from doublehorizon.algorithm import agent
from doublehorizon.algorithm.types import Task, Transition
from doublehorizon.algorithm.world_model import WorldModel, imagine_end
from doublehorizon.analysis.model_error import accuracy
from doublehorizon.config import Config
from doublehorizon.config_json import changed
from doublehorizon.presets import PRESETS
from worlds import TINY, budget

CONFIG = changed(TINY, {"model.width": 64, "fit.batch_size": 128, "fit.learning_rate": 3e-3, "terminator.width": 32})
LIMIT = 1.99


def past_limit(obs):
    return obs[..., 0] > LIMIT


KNOWN, LEARNT = Task(3, 1, past_limit), Task(3, 1, None, learns_termination=True)


def linear_rows(count: int, seed: int) -> Transition:
    """Steps of a linear system. One in about sixty ends its episode, which costs 200; other rewards are about 1."""
    rng = np.random.default_rng(seed)
    obs, act = rng.normal(size=(count, 3)), rng.uniform(-1, 1, (count, 1))
    next_obs = obs @ np.array([[0.9, 0.1, 0.0], [0.0, 0.9, 0.2], [0.1, 0.0, 0.8]]) + act * [0.1, 0.2, 0.3]
    terminated = past_limit(next_obs)
    reward = np.where(terminated, -200.0, obs[:, 1] + 0.5 * act[:, 0])
    return Transition(*(jnp.asarray(x, jnp.float32) for x in (obs, act, reward, next_obs, terminated)))


def fitted(config: Config, task: Task, rows: Transition, epochs: int = 300) -> WorldModel:
    count = rows.reward.shape[0]
    state, replay = agent.untrained(config, task, count, jnp.array([0]))
    replay, state = agent.store((jax.tree.map(lambda x: x[None], rows), state), replay)
    state, _ = agent.fit_model(config, budget(count, 2, epochs=epochs, ends=600), replay, state)
    return jax.tree.map(lambda x: x[0], state.world)


@pytest.mark.parametrize("task", [KNOWN, LEARNT], ids=["known rule", "learnt termination"])
def test_a_terminal_penalty_does_not_spoil_the_model(task):
    rows, others = linear_rows(2000, 0), linear_rows(2000, 1)
    assert 20 <= int(rows.terminated.sum()) <= 45
    world = fitted(CONFIG, task, rows)
    relative = accuracy(CONFIG, world, others).relative  # the reward of steps that continue, and three changes
    assert relative[0] < 0.2 and max(relative[1:]) < 0.2, relative
    # what an imagined step earns that terminates, and one that does not
    obs, act = jnp.array([[3.5, 0.0, 0.0], [-3.5, 0.0, 0.0]]), jnp.zeros((2, 1))
    continues, reward = imagine_end(task, world, (obs, act), 0.9 * obs, jnp.array([1.0, 1.0]), None)
    np.testing.assert_allclose(continues, [0.0, 1.0], atol=0.05)
    np.testing.assert_allclose(reward, [-200.0, 1.0], atol=10.0)
    if task is KNOWN:  # what would have been earned had the episode continued may overflow
        _, reward = imagine_end(task, world, (obs, act), 0.9 * obs, jnp.array([jnp.inf, 1.0]), None)
        np.testing.assert_allclose(reward, [-200.0, 1.0], atol=10.0)


def test_the_papers_presets_keep_terminal_rewards_in_the_model():
    rows = linear_rows(200, 0)
    for name in ("paper", "no-dr", "no-tr"):
        assert not PRESETS[name].terminator.rewards
    world = fitted(changed(CONFIG, {"terminator.rewards": False}), KNOWN, rows, epochs=1)
    np.testing.assert_allclose(world.target_normalizer.std[0], np.std(rows.reward), rtol=1e-3)
    assert world.termination_model is None
    apart = fitted(CONFIG, KNOWN, rows, epochs=1)
    running = np.asarray(rows.reward)[np.asarray(rows.terminated) == 0]
    np.testing.assert_allclose(apart.target_normalizer.std[0], np.std(running), rtol=1e-3)
