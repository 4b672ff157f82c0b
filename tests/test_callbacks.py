"""Ready-made callbacks, on runs that are written down by hand."""

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import doublehorizon as dh
from doublehorizon.acting.policy import NumpyPolicy
from doublehorizon.run.progress import Progress
from doublehorizon.training.callbacks import (
    Callback,
    EvaluateOn,
    Evaluation,
    SaveBest,
    StopAtReturn,
    StopWithoutImprovement,
    as_callback,
)
from worlds import TINY


def policy(bias: float) -> NumpyPolicy:
    """Always the same action, tanh(bias), on Pendulum."""
    weight, zeros = np.zeros((3, 2), np.float32), np.zeros(3, np.float32)
    bounds = (np.full(1, -2.0, np.float32), np.full(1, 2.0, np.float32))
    return NumpyPolicy((weight,), (np.array([bias, 0.0], np.float32),), zeros, zeros + 1.0, *bounds)


class Written(Progress):
    """A run that is written down."""

    returns: Any = None
    seeds: Any = None
    config: Any = TINY
    spec: Any = None
    iteration: Any = 0
    step: Any = 0
    goal: Any = 1000
    policies: Any = None

    def __init__(self, **values: Any):
        for name, value in values.items():
            setattr(self, name, value)


def told(callback: Callback, tests: dict[int, dict[int, float]], until: int, policies: Any = None) -> Any:
    """What it says to the test at `until`, when those up to there are done."""
    returns = {step: found for step, found in tests.items() if step <= until}
    progress = Written(returns=returns, seeds=[4, 5])
    return callback.on_evaluation(progress, Evaluation(until, returns[until], policies))


TESTS = {0: {4: 1.0, 5: 3.0}, 10: {4: 6.0, 5: 2.0}, 20: {4: 5.0, 5: 3.0}, 30: {4: 4.0, 5: 3.5}, 40: {4: 4.0, 5: 4.5}}


def test_a_return_is_reached_by_the_mean_or_by_every_seed():
    assert [told(StopAtReturn(4.0), TESTS, step) for step in TESTS] == [True, False, False, True, False]
    assert [told(StopAtReturn(4.0, every_seed=True), TESTS, step) for step in TESTS] == [True] * 4 + [False]


def test_a_run_stops_that_has_not_improved_for_some_tests():
    # means: 2, 4, 4, 3.75, 4.25
    assert [told(StopWithoutImprovement(2), TESTS, step) for step in TESTS] == [True, True, True, False, True]
    assert told(StopWithoutImprovement(3), TESTS, 30)
    with pytest.raises(dh.UserError, match="tests is 0"):
        StopWithoutImprovement(0)


def test_the_best_policy_of_all_seeds_and_tests_is_kept(tmp_path):
    keep, file = SaveBest(tmp_path / "deep" / "best.safetensors"), tmp_path / "deep" / "best.safetensors"
    tests = TESTS | {0: {4: 9.0, 5: 9.0}, 50: {4: 5.0, 5: 7.0}}  # random actions, at step 0, do not count
    kept = []
    for step in tests:
        told(keep, tests, step, None if step == 0 else [policy(step), policy(step + 1.0)])
        kept.append(float(dh.load_policy(file).biases[0][0]) if file.exists() else None)
    assert kept == [None, 10.0, 10.0, 10.0, 10.0, 51.0]  # seed 4 at step 10, then seed 5 at step 50
    assert keep.best() == SaveBest(file).best() == (7.0, 5, 50)
    file.unlink()
    assert keep.best() is None
    told(keep, TESTS, 30, [policy(30), policy(31)])
    told(keep, TESTS, 40, [policy(40), policy(41)])
    assert dh.load_policy(file).biases[0][0] == 41.0  # lost: the best from then on, 4.5 after 4
    assert keep.best() == (4.5, 5, 40)
    (tmp_path / "deep" / "best.json").write_text("{")
    with pytest.raises(dh.UserError, match=r"best\.json is damaged"):
        keep.best()


def test_a_policy_is_tested_on_another_environment_too():
    class Strong(gym.RewardWrapper):
        def reward(self, reward):
            return 1.0

    elsewhere = EvaluateOn(lambda: Strong(gym.make("Pendulum-v1", g=20.0)), every=2, episodes=1)
    spec = SimpleNamespace(obs_size=3, act_size=1)
    for iteration in range(6):
        now = Written(spec=spec, seeds=[4, 5], iteration=iteration, step=20 * iteration, goal=100)
        now.policies = [policy(0.0), policy(1.0)] if iteration > 0 else None
        elsewhere.on_iteration(now)
    assert elsewhere.returns == {step: {4: 200.0, 5: 200.0} for step in (40, 80, 100)}  # the last at the end
    now.spec.obs_size = 4
    with pytest.raises(dh.UserError, match="it cannot be tested there"):
        as_callback([elsewhere]).on_start(now)
    with pytest.raises(dh.UserError, match="has 3 observations and 1 actions, but the policy has 4 and 1"):
        elsewhere.on_iteration(now)


def test_several_callbacks_are_all_called_and_any_may_stop():
    class Counting(Callback):
        def __init__(self, answer: bool | None):
            self.answer, self.calls = answer, 0

        def on_iteration(self, progress):
            self.calls += 1
            return self.answer

    three = [Counting(None), Counting(False), Counting(True)]
    now = Written()
    assert as_callback(three).on_iteration(now) is False
    assert [one.calls for one in three] == [1, 1, 1]
    assert as_callback(three[::2]).on_iteration(now) is True
    assert told(as_callback([StopAtReturn(1.0), three[0]]), TESTS, 40) is False


@pytest.mark.parametrize("given", [3, "stop", StopAtReturn, [Callback(), 3]])
def test_what_is_no_callback_is_told_before_anything_is_done(given):
    with pytest.raises(dh.UserError, match=r"but it must be a dh\.Callback"):
        dh.DHMBPO("Pendulum-v1", config=TINY).learn(20, callback=given)


def test_callbacks_of_stable_baselines3_are_told_what_to_use():
    class EvalCallback:
        def init_callback(self, model): ...

        def __call__(self): ...

    with pytest.raises(dh.UserError, match=r"Stable-Baselines3's EvalCallback.*StopAtReturn"):
        as_callback(EvalCallback())


def test_public_names_are_listed():
    assert {"DHMBPO", "Config", "callbacks", "load_policy", "presets", "trackers"} <= set(dir(dh))
    assert all(getattr(dh, name) is not None for name in dir(dh))


def test_an_environment_that_does_not_fit_is_told_before_the_first_step(tmp_path):
    model = dh.DHMBPO("Pendulum-v1", config=TINY)
    with pytest.raises(dh.UserError, match="InvertedPendulum-v5 has 4 observations and 1 actions"):
        model.learn(40, out=tmp_path / "run", callback=[EvaluateOn("InvertedPendulum-v5")])
    assert model.num_timesteps == 0 and not (tmp_path / "run" / "eval.csv").exists()


def test_a_return_to_stop_at_is_a_number():
    with pytest.raises(dh.UserError, match="'-150', but the return to stop at is a number"):
        StopAtReturn.__init__.__wrapped__(StopAtReturn.__new__(StopAtReturn), "-150")  # past the type checks of tests
