"""The programs as wholes: seeds that do not touch each other, runs that repeat, nothing compiled twice."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from doublehorizon import agent, presets
from doublehorizon.config import Config, Horizons
from doublehorizon.devices import Program
from doublehorizon.envs.make import describe, factory, make
from doublehorizon.progress import Progress, begin
from doublehorizon.rollouts import no_nudges, training_rollout
from doublehorizon.seats import Recipe
from doublehorizon.train import train
from doublehorizon.types import Effort, Task
from doublehorizon.updates import (
    Setting,
    actor_gradient,
    actor_objective,
    draw_chance,
    fresh_moments,
    joint_update,
)
from doublehorizon.view import View
from doublehorizon.workers import Crew
from worlds import TINY

SPEC = describe(make("Pendulum-v1"))
HOPPER = describe(make("paper/Hopper"))


def run(seeds: list[int], steps: int, env: str = "Pendulum-v1", spec=SPEC, config=TINY) -> Progress:
    progress = begin(config, spec, seeds, steps)
    progress.goal = steps
    with Crew(Recipe(factory(env), spec), seeds) as crew, View(env, steps, quiet=True) as view:
        train(progress, crew, None, view)
    return progress


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))]


def test_the_same_seed_twice_gives_the_same_run_bit_for_bit():
    first, second = (run([0, 1], 80, "paper/Hopper", HOPPER) for _ in range(2))
    for a, b in zip(leaves((first.state, first.replay)), leaves((second.state, second.replay)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert first.returns == second.returns


def collected(seeds: list[int]) -> Progress:
    """Random steps only, stored."""
    return run(seeds, 20)


def one_epoch_and_one_update(progress: Progress):
    small = Effort(*(jnp.asarray(n, jnp.int32) for n in (20, 1, 100, 1, 1, 1)))
    state, _ = agent.fit_model((TINY, small, progress.replay), progress.state)
    members = leaves(state.world.members)

    @eqx.filter_jit
    def update(state, replay):
        def one(state, replay):
            ring = eqx.tree_at(
                lambda r: (r.rows, r.size), state.ring, (replay.rows.obs[jnp.arange(120) % 20], jnp.array(120))
            )
            setting = Setting(TINY, progress.task, state.world)
            moments = fresh_moments(TINY, state.policy)
            return joint_update(setting, state.policy, moments, draw_chance(setting, ring, state.key))[0]

        return jax.vmap(one)(state, replay)

    return members, leaves(update(state, progress.replay))


def test_seed_k_of_many_is_seed_k_alone():
    many, alone = collected([0, 1, 2]), collected([1])
    for a, b in zip(leaves(many.replay), leaves(alone.replay), strict=True):
        np.testing.assert_array_equal(a[1], b[0])  # same keys, same collected data
    for together, single in zip(leaves(many.state), leaves(alone.state), strict=True):
        np.testing.assert_allclose(together[1], single[0], atol=1e-6)  # same initial parameters
    for part, other in zip(one_epoch_and_one_update(many), one_epoch_and_one_update(alone), strict=True):
        for a, b in zip(part, other, strict=True):
            np.testing.assert_allclose(a[1], b[0], rtol=1e-5, atol=1e-5)


def test_a_seed_full_of_nan_leaves_the_others_alone():
    def after(poison: bool):
        progress = collected([0, 1])
        if poison:
            bad = progress.state.policy.actor.mlp.layers[0].weight.at[0].set(jnp.nan)
            progress.state = eqx.tree_at(lambda s: s.policy.actor.mlp.layers[0].weight, progress.state, bad)
        effort = Effort(*(jnp.asarray(n, jnp.int32) for n in (20, 1, 3, 3, 1, 2)))
        state, _ = agent.fit_model((TINY, effort, progress.replay), progress.state)
        state, _ = agent.improve_policy((TINY, progress.task, 20, effort, progress.replay), state)
        return leaves(state)

    for clean, poisoned in zip(after(False), after(True), strict=True):
        np.testing.assert_array_equal(clean[1], poisoned[1])


def test_nothing_is_compiled_twice(monkeypatch):
    # each program is traced once, the longer first iteration and a growing replay notwithstanding
    counts = {}
    for name in ("store", "fit_model", "improve_policy"):
        program = getattr(agent, name)
        inner = program.__wrapped__

        def counted(*args, inner=inner, name=name):
            counts[name] = counts.get(name, 0) + 1
            return inner(*args)

        monkeypatch.setattr(agent, name, Program(counted, "all-except-first" if name == "store" else "none"))
    run([0], 120)
    assert counts == {"store": 1, "fit_model": 1, "improve_policy": 1}


def test_the_actor_learns_from_critics_that_are_already_updated_and_targets_follow_slowly():
    progress = collected([0])
    state, replay = jax.tree.map(lambda x: x[0], (progress.state, progress.replay))
    ring = eqx.tree_at(lambda r: (r.rows, r.size), state.ring, (replay.rows.obs[jnp.arange(120) % 20], jnp.array(120)))
    setting = Setting(TINY, progress.task, state.world)
    chance, moments = draw_chance(setting, ring, state.key), fresh_moments(TINY, state.policy)
    after, _, metrics = joint_update(setting, state.policy, moments, chance)
    rate = TINY.critic.target_rate
    for old, new, target in zip(
        leaves(state.policy.target_critics), leaves(after.critics), leaves(after.target_critics), strict=True
    ):
        np.testing.assert_allclose(target, (1 - rate) * old + rate * new, atol=1e-7)
    # Adam's first step is the learning rate in each parameter that has a slope
    moved = np.abs(np.asarray(after.actor.mlp.layers[0].weight - state.policy.actor.mlp.layers[0].weight))
    assert np.median(moved) == pytest.approx(TINY.policy.learning_rate, rel=1e-2)
    assert set(metrics) >= {"train/critic_loss", "train/actor_loss", "train/ent_coef"}


def test_the_actors_gradient_is_that_through_the_whole_rollout():
    progress = collected([0])
    state, replay = jax.tree.map(lambda x: x[0], (progress.state, progress.replay))
    ring = eqx.tree_at(lambda r: (r.rows, r.size), state.ring, (replay.rows.obs[jnp.arange(120) % 20], jnp.array(120)))
    setting = Setting(TINY, progress.task, state.world)
    chance = draw_chance(setting, ring, state.key)
    critics = jax.tree.map(lambda x: x + 0.1, state.policy.critics)  # untrained, they have no slope
    policy = eqx.tree_at(lambda p: (p.critics, p.bounds.high), state.policy, (critics, jnp.ones(())))
    nudges = no_nudges(progress.task, chance.noise)

    def roll(actor, nudges):
        return training_rollout(progress.task, state.world, actor, chance.start, chance.noise, nudges)

    def objective(rollout):
        return actor_objective(setting, policy, rollout, jnp.asarray(0.1))

    rollout, pull_back = jax.vjp(lambda nudges: roll(policy.actor, nudges), nudges)
    ours = actor_gradient(setting, policy.actor, rollout.obs, *pull_back(jax.grad(objective)(rollout)))
    directly = jax.grad(lambda actor: objective(roll(actor, nudges)))(policy.actor)
    for a, b in zip(leaves(ours), leaves(directly), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)
        assert np.abs(b).max() > 1e-5


def test_critic_only_updates_leave_the_actor_and_the_temperature_alone():
    progress = collected([0])
    effort = Effort(*(jnp.asarray(n, jnp.int32) for n in (20, 1, 3, 3, 1, 0)))
    before = leaves((progress.state.policy.actor, progress.state.policy.log_temperature))
    critics = leaves(progress.state.policy.critics)
    state, _ = agent.improve_policy((TINY, progress.task, 20, effort, progress.replay), progress.state)
    for a, b in zip(before, leaves((state.policy.actor, state.policy.log_temperature)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert any(not np.array_equal(a, b) for a, b in zip(critics, leaves(state.policy.critics), strict=True))
    assert int(state.ring.size[0]) == 8 * 5  # one distribution rollout


def planned(config: Config, num_rows: int, first: bool) -> list[int]:
    effort = agent.plan(config, Task(17, 6, None), num_rows, 1000, first)
    return [int(x) for x in (effort.fit_batches, effort.patience, effort.max_epochs, effort.num_rounds)]


def test_the_papers_effort_counts_epochs():
    assert planned(presets.paper, 5000, first=True) == [1, 722, 3612, 250]
    assert planned(presets.paper, 50_000, first=False) == [6, 144, 722, 50]


def test_the_default_effort_is_the_papers_while_epochs_are_short():
    assert planned(Config(), 5000, first=True) == [1, 722, 3612, 250]
    assert planned(Config(), 7000, first=False) == [2, 144, 722, 50]
    assert planned(Config(), 50_000, first=False) == [6, 144, 241, 50]  # 722 * 2 / 6


def test_a_short_distribution_rollout_has_more_rows():
    assert Config().distribution_rows == 256
    assert Config(horizons=Horizons(distribution=10)).distribution_rows == 512  # the authors' two passes
