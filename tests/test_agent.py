"""The programs as wholes: seeds that do not touch each other, runs that repeat, nothing compiled twice."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from doublehorizon.acting.env_runner import WorkerSpec
from doublehorizon.acting.workers import WorkerPool
from doublehorizon.algorithm import agent
from doublehorizon.algorithm.start_states import start_states
from doublehorizon.algorithm.updates import (
    UpdateContext,
    draw_inputs,
    fresh_opt_states,
    joint_update,
)
from doublehorizon.envs.make import describe, factory, make
from doublehorizon.run.progress import Progress, begin
from doublehorizon.training.live_view import View
from doublehorizon.training.train import train
from worlds import TINY, budget

SPEC = describe(make("Pendulum-v1"))
HOPPER = describe(make("paper/Hopper"))


def run(seeds: list[int], steps: int, env: str = "Pendulum-v1", spec=SPEC, config=TINY) -> Progress:
    progress = begin(config, spec, seeds, steps)
    progress.update(goal=steps)
    with WorkerPool(WorkerSpec(factory(env), spec), seeds) as pool, View(env, steps, quiet=True) as view:
        train(progress, pool, None, view)
    return progress


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))]


@pytest.mark.slow
def test_the_same_seed_twice_gives_the_same_run_bit_for_bit():
    first, second = (run([0, 1], 80, "paper/Hopper", HOPPER) for _ in range(2))
    for a, b in zip(leaves((first.agent, first.replay)), leaves((second.agent, second.replay)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert first.returns == second.returns


def collected(seeds: list[int]) -> Progress:
    """Random steps only, stored."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("doublehorizon.training.train.Programs", lambda progress: None)  # nothing is compiled
        return run(seeds, 20)


def one_epoch_and_one_update(progress: Progress):
    state, _ = agent.fit_model(TINY, budget(20), progress.replay, progress.agent)
    members = leaves(state.world.members)

    @eqx.filter_jit
    def update(state, replay):
        def one(state, replay):
            starts = start_states(TINY, 20, replay, None)
            context = UpdateContext(TINY, progress.task, state.world)
            opt_states = fresh_opt_states(TINY, state.actor_critic)
            return joint_update(context, state.actor_critic, opt_states, draw_inputs(context, starts, state.key))[0]

        return jax.vmap(one)(state, replay)

    return members, leaves(update(state, progress.replay))


def test_seed_k_of_many_is_seed_k_alone():
    many, alone = collected([0, 1]), collected([1])
    for a, b in zip(leaves(many.replay), leaves(alone.replay), strict=True):
        np.testing.assert_array_equal(a[1], b[0])  # same keys, same collected data
    for together, single in zip(leaves(many.agent), leaves(alone.agent), strict=True):
        np.testing.assert_allclose(together[1], single[0], atol=1e-6)  # same initial parameters
    for part, other in zip(one_epoch_and_one_update(many), one_epoch_and_one_update(alone), strict=True):
        for a, b in zip(part, other, strict=True):
            np.testing.assert_allclose(a[1], b[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_seed_full_of_nan_leaves_the_others_alone():
    def after(poison: bool):
        progress = collected([0, 1])
        if poison:
            bad = progress.agent.actor_critic.actor.mlp.layers[0].weight.at[0].set(jnp.nan)
            at = lambda s: s.actor_critic.actor.mlp.layers[0].weight  # noqa: E731
            progress.update(agent=eqx.tree_at(at, progress.agent, bad))
        work = budget(20, 1, 3, 3, rounds=2)
        state, _ = agent.fit_model(TINY, work, progress.replay, progress.agent)
        state, _ = agent.improve_policy(TINY, progress.task, 20, work, progress.replay, state)
        return leaves(state)

    for clean, poisoned in zip(after(False), after(True), strict=True):
        np.testing.assert_array_equal(clean[1], poisoned[1])


def test_nothing_is_compiled_twice(traced_run):
    """The longer first iteration and a growing replay are the same programs."""
    _, traced = traced_run
    assert {name: traced[name] for name in ("store", "fit_model", "improve_policy")} == {
        "store": 1,
        "fit_model": 1,
        "improve_policy": 1,
    }
