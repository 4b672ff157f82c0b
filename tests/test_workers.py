import subprocess
import sys
import threading

import gymnasium as gym
import numpy as np
import pytest

from doublehorizon.envs.make import describe, factory, make
from doublehorizon.errors import RunError, UserError
from doublehorizon.workers import Crew

SPEC = describe(make("Pendulum-v1"))


def crew(seeds: list[int], in_process: bool = False, env="Pendulum-v1") -> Crew:
    return Crew(factory(env), SPEC, seeds, in_process=in_process)


def test_a_seed_collects_the_same_whoever_is_beside_it():
    with crew([3, 4, 5]) as many, crew([4], in_process=True) as one:
        together, alone = many.collect(None, 250), one.collect(None, 250)
    assert together["obs"].shape == (3, 250, 3)
    for name, value in alone.items():
        np.testing.assert_array_equal(together[name][1], value[0])
    assert not np.array_equal(together["obs"][0], together["obs"][1])


def test_a_later_crew_does_not_repeat_an_earlier_one():
    with crew([0], in_process=True) as first, Crew(factory("Pendulum-v1"), SPEC, [0], 5, in_process=True) as later:
        one, other = first.collect(None, 20), later.collect(None, 20)
    assert not np.isclose(one["obs"], other["obs"]).all(axis=-1).any()
    assert not np.isclose(one["act"], other["act"]).any()


def test_a_factory_that_cannot_be_sent_is_named():
    lock = threading.Lock()

    def make_it():
        return lock

    with pytest.raises(UserError, match="cannot be sent to worker processes"):
        crew([0], env=make_it)


def test_episodes_go_on_across_calls_and_rows_are_linked():
    with crew([0], in_process=True) as split, crew([0], in_process=True) as whole:
        first, second = split.collect(None, 120), split.collect(None, 130)
        expected = whole.collect(None, 250)
    joined = {name: np.concatenate([first[name], second[name]], axis=1) for name in first}
    for name, value in expected.items():
        np.testing.assert_array_equal(joined[name], value)
    next_obs, obs = joined["next_obs"][0, :-1], joined["obs"][0, 1:]
    linked = (next_obs == obs).all(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(~linked), [199])  # the time limit of 200 steps
    assert not joined["terminated"].any()


def test_evaluations_run_in_the_background_and_are_seeded_by_the_step():
    with crew([0, 1, 2]) as remote, crew([1], in_process=True) as local:
        for step in (0, 1000):
            remote.start_evaluation(None, step, 2)
        found = {(step, seed): value for step, seed, value in remote.finished_evaluations(block=True)}
        local.start_evaluation(None, 1000, 2)
        ((_, _, alone),) = local.finished_evaluations(block=True)
    assert set(found) == {(step, seed) for step in (0, 1000) for seed in (0, 1, 2)}
    assert found[1000, 1] == alone
    assert len(set(found.values())) == 6


def test_an_environment_that_raises_is_reported_with_its_traceback():
    def broken():
        class Broken(gym.Wrapper):
            def step(self, action):
                raise ZeroDivisionError("the motor is gone")

        return Broken(gym.make("Pendulum-v1"))

    with crew([0], env=broken) as workers, pytest.raises(RunError, match="the motor is gone"):
        workers.collect(None, 5)


def test_workers_leave_with_their_crew():
    workers = crew([0, 1])
    processes = [worker._process for worker in (*workers._collectors, *workers._evaluators)]  # type: ignore[union-attr]
    workers.close()
    assert all(process.poll() is not None for process in processes)


def test_a_worker_that_dies_is_reported():
    def deadly():
        class Deadly(gym.Wrapper):
            def step(self, action):
                import os

                os._exit(3)

        return Deadly(gym.make("Pendulum-v1"))

    with crew([0], env=deadly) as workers, pytest.raises(RunError, match="died"):
        workers.collect(None, 5)


def test_neither_workers_nor_policies_import_jax():
    code = "import sys, doublehorizon, doublehorizon.workers, doublehorizon.policy; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
