"""What an iteration does: its budget, its updates, its distribution rollouts, its keys."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from doublehorizon import presets
from doublehorizon.algorithm import agent
from doublehorizon.algorithm.start_states import start_states
from doublehorizon.algorithm.types import Task, Transition
from doublehorizon.algorithm.updates import UpdateContext, draw_inputs
from doublehorizon.config import Config, Horizons
from doublehorizon.config_json import changed
from doublehorizon.schedule import evaluate_every, first_effort, seed_iterations, steps_per_iteration
from worlds import TINY, budget

KEEPING = changed(TINY, {"policy.keep_moments": True, "policy.ring_capacity": 400, "policy.clear_each_iteration": True})
TASK = Task(3, 1, None)


def planned(config: Config, num_rows: int, first: bool) -> list[int]:
    work = agent.iteration_budget(config, Task(17, 6, None), num_rows, 1000, 5.0 if first else None)
    return [work.fit_batches, work.patience, work.max_epochs, work.num_rounds]


def test_the_papers_effort_counts_epochs():
    assert planned(presets.paper, 5000, first=True) == [1, 722, 3612, 250]
    assert planned(presets.paper, 50_000, first=False) == [6, 144, 722, 50]


def test_a_factor_on_minibatches_shortens_late_fits_alone():
    shorter = changed(presets.paper, {"fit.batches_factor": 2.0})
    assert planned(shorter, 5000, first=True) == [1, 722, 3612, 250]
    assert planned(shorter, 7000, first=False) == [2, 144, 722, 50]
    assert planned(shorter, 50_000, first=False) == [6, 144, 241, 50]  # 722 * 2 / 6


def test_a_little_fit_has_so_many_minibatches_for_each_new_step():
    little = changed(Config(), {"fit.batches_per_step": 1.5, "fit.batches_per_epoch": 4})
    assert planned(little, 5000, first=True)[::2] == [4, 1875]  # 5000 * 1.5 / 4
    assert planned(little, 50_000, first=False)[::2] == [4, 375]


def test_new_rows_are_those_of_the_last_steps_and_in_the_first_iteration_all():
    assert agent.iteration_budget(Config(), TASK, 5000, 1000, 5.0).num_new == 5000
    assert agent.iteration_budget(Config(), TASK, 6000, 1000).num_new == 1000


def test_the_first_iteration_has_as_many_updates_as_there_were_random_steps():
    often = Config()
    for config, time_limit, steps in (
        (presets.paper, 1000, 5000),
        (presets.paper, 300, 1500),
        (often, 1000, 2000),
        (often, 500, 1000),
        (often, 100, 400),
    ):
        per_iteration = steps_per_iteration(config, time_limit)
        assert seed_iterations(config, time_limit) * per_iteration == steps
        work = agent.iteration_budget(config, TASK, steps, per_iteration, first_effort(config, steps / per_iteration))
        assert work.num_rounds * config.policy.refresh_every == steps * config.policy.updates_per_step
    assert first_effort(changed(often, {"fit.first_effort": 3.0}), 10) == 3.0
    assert first_effort(often, 0) == 1.0


def test_tests_have_at_most_twice_the_steps_of_training():
    for time_limit, steps in ((1000, 5000), (500, 2600), (200, 1000), (50, 1000)):  # whole iterations of 200
        assert evaluate_every(Config(), time_limit) * 200 == steps
    assert evaluate_every(presets.paper, 1000) == 10
    assert evaluate_every(changed(Config(), {"loop.evaluate_every": 3}), 1000) == 3


def test_a_short_distribution_rollout_has_more_rows():
    assert Config().distribution_rows == 256
    assert Config(horizons=Horizons(distribution=10)).distribution_rows == 512  # the authors' two passes


def one_seed(config: Config = KEEPING) -> tuple:
    """An untrained agent and a replay of 20 random rows, with a seed axis."""
    obs = jr.normal(jr.key(1), (1, 20, 3))
    rows = Transition(obs, obs[..., :1], obs[..., 0], obs + 1.0, jnp.zeros((1, 20)))
    state, empty = agent.untrained(config, TASK, 40, jnp.array([0]))
    return agent.store((rows, state), empty)


def test_updates_are_as_many_as_planned_and_moments_last():
    replay, state = one_seed()
    obs = np.asarray(replay.rows.obs[0, :20])

    def counts(state):
        adam = (state.opt_states.actor, state.opt_states.critics)
        return [int(optax.tree_utils.tree_get(x, "count")[0]) for x in adam]

    starts = []
    for k in (1, 2):  # 5 updates of the critics alone, then two rounds of 4
        state, metrics = agent.improve_policy(KEEPING, TASK, 20, budget(20, rounds=2), replay, state)
        assert counts(state) == [k * 8, k * 13]
        # a distribution rollout first, and one in each round; those of the iteration before are cleared
        assert int(state.model_buffer.size[0]) == 3 * 40
        for pushed in np.asarray(state.model_buffer.rows.obs[0, :120]).reshape(3, 5, 8, 3):
            starts.append([int(np.flatnonzero((obs == row).all(1))[0]) for row in pushed[0]])  # all are stored rows
        assert np.isfinite(metrics["train/actor_gradient_norm"]).all()
    assert len({tuple(rows) for rows in starts}) == 6  # drawn anew each time


def learnt_from(scale: float, shift: float = 0.0) -> tuple:
    """An agent after a fit and an optimisation of its policy, from the same rows with other rewards."""
    replay, state = one_seed()
    replay = eqx.tree_at(lambda r: r.rows.reward, replay, scale * replay.rows.reward + shift)
    state, _ = agent.fit_model(KEEPING, budget(20, epochs=3), replay, state)
    state, metrics = agent.improve_policy(KEEPING, TASK, 20, budget(20, rounds=2), replay, state)
    actor_critic = state.actor_critic
    networks = (state.world.members, actor_critic.actor, actor_critic.critics, actor_critic.log_temperature)
    return jax.tree.leaves(networks), actor_critic.bounds, {name: float(x[0]) for name, x in metrics.items()}


def test_the_scale_of_rewards_does_not_matter():
    networks, bounds, metrics = learnt_from(1.0)
    for scale in (1024.0, 1 / 1024):  # powers of two: not even rounding differs
        scaled, wider, found = learnt_from(scale)
        for one, other in zip(networks, scaled, strict=True):
            np.testing.assert_array_equal(one, other)
        assert float(wider.low[0]) == scale * float(bounds.low[0])
        assert found["train/reward_unit"] == scale * metrics["train/reward_unit"]
        assert found["train/ent_coef"] == metrics["train/ent_coef"]
        assert found["train/critic_loss"] == scale**2 * metrics["train/critic_loss"]


def test_a_constant_added_to_rewards_does_not_matter_where_episodes_never_end():
    networks, bounds, metrics = learnt_from(1.0)
    shifted, moved, found = learnt_from(1.0, shift=10.0)
    for one, other in zip(networks, shifted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)
    forever = 10.0 / (1.0 - KEEPING.policy.discount)
    assert float(moved.low[0] - bounds.low[0]) == pytest.approx(forever, rel=1e-3)
    assert found["train/q_target"] - metrics["train/q_target"] == pytest.approx(forever, rel=1e-2)


def test_critic_only_updates_leave_the_actor_and_the_temperature_alone():
    replay, before = one_seed()
    after, _ = agent.improve_policy(KEEPING, TASK, 20, budget(20, rounds=0), replay, before)
    same = ((s.actor_critic.actor, s.actor_critic.log_temperature) for s in (before, after))
    for a, b in zip(*map(jax.tree.leaves, same), strict=True):
        np.testing.assert_array_equal(a, b)
    critics = (jax.tree.leaves(s.actor_critic.critics) for s in (before, after))
    assert any(not np.array_equal(a, b) for a, b in zip(*critics, strict=True))
    assert int(after.model_buffer.size[0]) == 8 * 5  # one distribution rollout


def test_distribution_rollouts_start_in_every_stored_row():
    replay, state = jax.tree.map(lambda x: x[0], one_seed())
    context = UpdateContext(TINY, TASK, state.world)

    def starts(key):
        num_rows, buffer = jnp.asarray(20, jnp.int32), state.model_buffer
        return agent.refresh(context, num_rows, replay, state.actor_critic, buffer, key).rows.obs[:8]

    found = np.unique(np.asarray(jax.vmap(starts)(jr.split(jr.key(0), 60))).reshape(-1, 3), axis=0)
    np.testing.assert_array_equal(found, np.unique(np.asarray(replay.rows.obs[:20]), axis=0))


def test_without_rollout_noise_members_follow_their_means():
    """The noise of states is drawn as ever and then multiplied, in distribution and in training rollouts."""
    replay, state = jax.tree.map(lambda x: x[0], one_seed())
    num_rows = jnp.asarray(20, jnp.int32)

    def imagined(scale):
        context = UpdateContext(TINY.with_(model__rollout_noise=scale), TASK, state.world)
        buffer = agent.refresh(context, num_rows, replay, state.actor_critic, state.model_buffer, jr.key(0))
        inputs = draw_inputs(context, start_states(TINY, num_rows, replay, buffer), jr.key(1))
        return buffer.rows.obs, inputs.noise

    (silent, no_noise), (half, half_noise), (whole, noise) = map(imagined, (0.0, 0.5, 1.0))
    assert np.all(np.asarray(no_noise.step.state) == 0.0)
    np.testing.assert_array_equal(half_noise.step.state, 0.5 * noise.step.state)
    np.testing.assert_array_equal(no_noise.act, noise.act)
    rows = TINY.distribution_rows
    np.testing.assert_array_equal(silent[:rows], whole[:rows])  # where they start
    # an untrained model's noise has a scale of one: after the first step half the noise is half way
    first, half_way, full = (np.asarray(x[rows : 2 * rows]) for x in (silent, half, whole))
    assert np.abs(full - first).max() > 0.1
    np.testing.assert_allclose(half_way - first, 0.5 * (full - first), atol=1e-5)


def test_keys_move_on_with_every_program_and_with_another_try():
    replay, before = one_seed()
    rows = jax.tree.map(lambda x: x[:, :20], replay.rows)
    weights = np.asarray(replay.weight[0, :20])
    replay, stored = agent.store((rows, before), replay)
    assert not np.array_equal(weights, np.asarray(replay.weight[0, 20:40]))
    fitted, _ = agent.fit_model(KEEPING, budget(20), replay, stored)
    states = (before, stored, fitted, agent.with_fresh_keys(stored))
    assert len({np.asarray(jr.key_data(state.key)).tobytes() for state in states}) == 4
    # statistics are those of all stored rows
    np.testing.assert_allclose(fitted.world.obs_normalizer.mean[0], rows.obs[0].mean(0), rtol=1e-4, atol=1e-6)
    target = np.concatenate([rows.reward[0][:, None], (rows.next_obs - rows.obs)[0]], axis=1)
    np.testing.assert_allclose(fitted.world.target_normalizer.mean[0], target.mean(0), rtol=1e-4, atol=1e-6)
