"""The ablations no-dr, no-tr and sac: the same algorithm with other values."""

from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import doublehorizon as dh
from doublehorizon import presets
from doublehorizon.algorithm import agent
from doublehorizon.algorithm.model_buffer import ModelBuffer
from doublehorizon.algorithm.networks import mean_and_std, sample_action
from doublehorizon.algorithm.normalizer import Normalizer
from doublehorizon.algorithm.rollouts import no_perturbations, one_step_rollout
from doublehorizon.algorithm.start_states import StartStates
from doublehorizon.algorithm.types import Task, Transition
from doublehorizon.algorithm.updates import UpdateContext, critic_rollout, critic_target, draw_inputs, start_rollout
from doublehorizon.algorithm.values import unknown_bounds, update_bounds
from doublehorizon.cli import _status
from doublehorizon.config_json import changed, from_json, to_json
from doublehorizon.errors import UserError
from doublehorizon.presets import PRESETS, RELATIVES
from doublehorizon.run.run_reader import read_rows
from kept import differences
from worlds import TINY, constant_critics, line_world, random_actor, random_world

SMALL = {name: changed(TINY, changes) for name, changes in RELATIVES.items()}
SMALL["sac"] = changed(SMALL["sac"], {"loop.steps_per_iteration": 20})
TASK = Task(1, 1, lambda obs: obs[..., 0] > 2.0)


def steps_of_the_past(count: int = 1) -> StartStates:
    """Of the policy before: 3 forwards from 0 to 3, where it ends; back from 1 to 0.5. Each `count` times."""
    obs, next_obs = jnp.array([[0.0], [1.0]] * count), jnp.array([[3.0], [0.5]] * count)
    reward, ended = jnp.array([7.0, -1.0] * count), jnp.array([1.0, 0.0] * count)
    steps = Transition(obs, next_obs - obs, reward, next_obs, ended)
    return StartStates(None, ModelBuffer(steps, jnp.array(0), jnp.array(2 * count)))


@pytest.mark.parametrize("name", ["no-tr", "sac"])
def test_the_target_of_a_single_step_by_hand(name):
    config = changed(SMALL[name], {"policy.batch_size": 8, "policy.discount": 0.9})
    context = UpdateContext(config, TASK, line_world())
    policy = constant_critics((0.3, 0.2), bounds=(-100.0, 100.0), temperature=0.5)
    inputs = draw_inputs(context, steps_of_the_past(4), jr.key(0))
    start = inputs.start
    rollout = start_rollout(context, policy, inputs, no_perturbations(TASK, inputs.noise))
    assert rollout.reward.shape == (0, 8) and rollout.act.shape == (1, 8, 1)
    path = critic_rollout(context, policy, inputs, rollout)
    np.testing.assert_array_equal(path.act[0], start.act)  # what was done then
    np.testing.assert_allclose(path.act[1], 0.25, rtol=1e-4)  # what the policy does now

    # the smaller of two critics says 20
    target = critic_target(context, policy, path, jnp.array([0, 1]))
    # its standard deviation is 1e-5 (the least), and the noise was drawn: log N - log(1 - a^2), by hand
    noise = np.asarray(inputs.next_act_noise)[:, 0]
    std = 1e-5 + np.log1p(np.exp(-20.0))
    log_prob = -0.5 * noise**2 - np.log(std) - 0.5 * np.log(2 * np.pi) - np.log(1 - 0.25**2)
    alive = 1.0 - np.asarray(start.terminated)
    expected = np.asarray(start.reward) + 0.9 * alive * (20.0 - 0.5 * log_prob)
    np.testing.assert_allclose(target, expected, rtol=1e-3)
    assert {7.0} == set(np.asarray(target)[alive == 0].tolist())  # after an end there is nothing


def one_step(config, task) -> tuple:
    """An update's inputs, its training rollout of no step, and what the critics learn from."""
    context = UpdateContext(config, task, line_world())
    policy = constant_critics((0.3, 0.2), bounds=(-100.0, 100.0), temperature=0.5)
    inputs = draw_inputs(context, steps_of_the_past(4), jr.key(1))
    rollout = start_rollout(context, policy, inputs, no_perturbations(task, inputs.noise))
    return inputs, rollout, critic_rollout(context, policy, inputs, rollout)


def test_after_a_stored_step_the_policy_acts_in_the_state_that_it_led_to():
    actor, key = random_actor(2, 1), jr.key(3)
    obs, next_obs = jr.normal(key, (2, 5, 2))
    step = Transition(obs, jnp.full((5, 1), 0.9), jnp.zeros(5), next_obs, jnp.zeros(5))
    normalizer = Normalizer(jnp.array([0.5, -1.0]), jnp.array([2.0, 0.5]))
    world = replace(random_world(2, 1, 2), obs_normalizer=normalizer)
    noise = jnp.linspace(-1.0, 1.0, 5)[:, None]
    path = one_step_rollout(Task(2, 1, None), world, actor, step, jnp.arange(5.0), noise)
    act, log_prob = sample_action(*mean_and_std(actor(normalizer.normalize(next_obs))), noise)
    np.testing.assert_allclose(path.act[1], act, rtol=1e-5)
    np.testing.assert_allclose(path.log_prob, jnp.stack([jnp.arange(5.0), log_prob]), rtol=1e-5)
    np.testing.assert_array_equal(path.obs, jnp.stack([obs, next_obs]))


def test_a_reward_of_one_s_own_counts_for_real_steps_too():
    task = Task(1, 1, None, reward=lambda obs, act, next_obs: 10.0 * next_obs[..., 0])
    inputs, _, path = one_step(changed(SMALL["sac"], {"policy.batch_size": 8}), task)
    np.testing.assert_allclose(path.reward[0], 10.0 * inputs.start.next_obs[:, 0])


def test_the_bounds_of_a_single_step_come_from_its_reward_and_from_what_the_policy_does_now():
    config = changed(SMALL["sac"], {"policy.batch_size": 8, "critic.quantile": 0.0, "critic.bounds": "all"})
    inputs, rollout, path = one_step(config, TASK)
    bounds = update_bounds(config.critic, 0.9, True, unknown_bounds(), path, jnp.array(0.5))
    soft = np.asarray(inputs.start.reward) - 0.5 * np.asarray(rollout.log_prob[0])
    np.testing.assert_allclose([bounds.low, bounds.high], [10 * soft.min(), 10 * soft.max()], rtol=1e-5)


@pytest.mark.parametrize(("old", "new"), [("svg", "no-dr"), ("mbpo", "no-tr"), ("mbpo-utd", "no-tr-utd")])
def test_old_names_say_the_new_ones(old, new, capsys):
    line = f"doublehorizon: `{old}` is now `{new}`\n"
    with pytest.raises(UserError, match=f"`{old}` is now `{new}`"):
        getattr(presets, old)
    assert not hasattr(presets, old)
    words = ["experiment", old] if old.endswith("utd") else ["train", "Pendulum-v1", "--preset", old]
    assert _status(words) == 2 and capsys.readouterr().err == line
    if not old.endswith("utd"):
        assert _status(["experiment", "ablation", "--variants", old]) == 2 and capsys.readouterr().err == line
        assert getattr(presets, new.replace("-", "_")) == PRESETS[new]


def test_relatives_differ_in_values_alone():
    assert PRESETS["no-dr"].horizons.distribution == 0 and PRESETS["no-dr"].horizons.training == 5
    assert PRESETS["no-tr"].horizons.distribution == 20 and PRESETS["no-tr"].horizons.training == 0
    assert not PRESETS["sac"].has_model and PRESETS["sac"].critic == PRESETS["paper"].critic
    for config in (*PRESETS.values(), changed(dh.Config(), {"model.norm_eps": None, "critic.norm_eps": None})):
        assert from_json(to_json(config)) == config
    for changes in RELATIVES.values():
        for base in ("light", "quick", "paper"):
            assert changed(PRESETS[base], changes).critic == PRESETS[base].critic


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"horizons.training": 0, "horizons.distribution": 0}, "model.members is 8, but it must be 0"),
        ({"model.members": 0}, "model.members is 0, but it must be at least 2"),
        ({"horizons.training": -1}, "horizons.training is -1, but it must be at least 0"),
        ({"loop.steps_per_turn": 20}, "loop.steps_per_turn is 20, but it must be None where there is a model"),
        (
            {**RELATIVES["sac"], "policy.updates_per_step": 1.5},
            "policy.updates_per_step is 1.5, but it must be",
        ),
        ({**RELATIVES["sac"], "loop.steps_per_turn": 7}, "loop.steps_per_turn is 7, but it must be a multiple of 5"),
    ],
)
def test_values_that_make_no_sense_are_refused(changes, words):
    with pytest.raises(dh.UserError, match=words):
        changed(dh.Config(), changes)


def test_training_starts_from_the_ring_or_from_the_replay():
    def starts(name: str) -> set[float]:
        config = changed(SMALL[name], {"model.members": 2} if name != "sac" else {})
        seed = agent.initial_state(config, Task(1, 1, None), jnp.array(0))
        return seed.model_buffer if seed.model_buffer is None else type(seed.model_buffer.rows)

    assert starts("no-dr") is None and starts("sac") is None
    assert starts("no-tr") is Transition


@pytest.mark.parametrize("name", ["sac", *(pytest.param(x, marks=pytest.mark.slow) for x in ("no-dr", "no-tr"))])
def test_a_tiny_run_goes_on_bit_for_bit(name, tmp_path):
    dh.DHMBPO("Pendulum-v1", seeds=2, config=SMALL[name]).learn(120, out=tmp_path / "whole")
    dh.DHMBPO("Pendulum-v1", seeds=2, config=SMALL[name]).learn(80, out=tmp_path / "parts")
    dh.DHMBPO.load(tmp_path / "parts").resume(tmp_path / "parts", 120)
    assert differences(tmp_path / "whole", tmp_path / "parts") == []
    rows = read_rows(tmp_path / "whole" / "progress.csv")
    assert ("model/epochs" in rows[0]) == (name != "sac")
    assert all(np.isfinite(float(row["train/critic_loss"])) for row in rows)


def test_without_a_model_a_policy_acts_for_a_few_steps_only(monkeypatch):
    from doublehorizon.acting.workers import WorkerPool

    turns, collect = [], WorkerPool.collect

    def noted(self, policies, steps, at, **named):
        turns.append((steps, at, None if policies is None else policies[0].weights[0].copy()))
        return collect(self, policies, steps, at, **named)

    monkeypatch.setattr(WorkerPool, "collect", noted)
    model = dh.DHMBPO("Pendulum-v1", seeds=2, config=SMALL["sac"]).learn(80)
    assert [turn[:2] for turn in turns[:4]] == [(20, 0), (20, 20), (5, 40), (5, 45)]
    assert len(turns) == 2 + 40 // 5 and model.num_timesteps == 80
    assert all(np.any(a[2] != b[2]) for a, b in pairwise(turns[2:]))  # each has learnt


def test_lasting_moments_are_not_reset():
    model = dh.DHMBPO("Pendulum-v1", seeds=2, config=SMALL["sac"]).learn(80)
    counts = {
        int(x[0]) for x in jax.tree.leaves(model._progress.agent.opt_states) if x.ndim == 1 and x.dtype == jnp.int32
    }
    assert counts == {5 + 40}  # one update per step, the first turn's included
