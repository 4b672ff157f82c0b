"""Environments of every kind, each through an iteration end to end; and what users bring with them."""

import dataclasses
import json

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box

import doublehorizon as dh
from doublehorizon.config import LoopConfig
from doublehorizon.run.progress import fetch_policies
from worlds import TINY


class Cart(gym.Env):
    """A point on a line, pushed, and a number that stays as it is; the base of the odd ones below."""

    observation_space: gym.Space = Box(-np.inf, np.inf, (3,))
    action_space = Box(-1.0, 1.0, (1,))
    ends_past: float = np.inf

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = self.np_random.normal(size=3).astype(np.float32) * 0.1
        return self.seen(), {}

    def step(self, action):
        push = float(np.ravel(action)[0])
        self.state = (self.state + 0.1 * np.array([self.state[1], push, 0.0])).astype(np.float32)
        return self.seen(), -float(np.square(self.state[0])), bool(abs(self.state[0]) > self.ends_past), False, {}

    def seen(self):
        return self.state


class Tiring(Cart):
    """Every push costs."""

    def step(self, action):
        seen, _, *rest = super().step(action)
        return seen, -float(np.sum(np.square(action))), *rest


class DictCart(Cart):
    observation_space = spaces.Dict(place=Box(-np.inf, np.inf, (1,)), speed=Box(-np.inf, np.inf, (1, 2)))

    def seen(self):
        return {"place": self.state[:1], "speed": self.state[None, 1:]}


class UnevenCart(Cart):
    action_space = Box(np.array([-0.5, 3.0]), np.array([2.0, 4.0]), dtype=np.float64)


class OneStepCart(Cart):
    ends_past = -1.0


class EndlessCart(Cart):
    pass


class SquareCart(Cart):
    action_space = Box(-1.0, 1.0, (2, 2))
    ends_past = 0.3


def limited(loop: LoopConfig | None = None, **changes) -> dh.Config:
    loop = dataclasses.replace(loop or TINY.loop, time_limit=40)
    return dataclasses.replace(TINY, loop=loop, **changes)


def slowly(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("env", "sizes", "termination"),
    [
        slowly("Pendulum-v1", (3, 1), "known"),
        slowly("MountainCarContinuous-v0", (2, 1), "learned"),
        slowly("InvertedPendulum-v5", (4, 1), "known"),
        slowly("Hopper-v5", (11, 3), "known"),
        slowly("Humanoid-v5", (348, 17), "known"),
        slowly("dmc/cartpole-swingup", (5, 1), "known"),
        slowly("dmc/reacher-easy", (6, 2), "known"),
        slowly("cup-catch", (8, 2), "known"),
        slowly("dm_control/cheetah-run-v0", (17, 6), "known"),
        slowly(DictCart, (3, 1), "learned"),  # a Dict learns in test_named_runs, too
        slowly(UnevenCart, (3, 2), "learned"),
        (OneStepCart, (3, 1), "learned"),
        slowly(EndlessCart, (3, 1), "learned"),
        slowly(SquareCart, (3, 4), "learned"),
    ],
)
def test_an_iteration_end_to_end(env, sizes, termination, tmp_path):
    if isinstance(env, str) and ("dm" in env or "cup" in env):
        pytest.importorskip("dm_control")
    known = {"reward": reward} if env is OneStepCart else {}  # whose programs another test has, too
    model = dh.DHMBPO(env, config=limited() if not isinstance(env, str) else TINY, **known)
    assert (model.spec.obs_size, model.spec.act_size, model.spec.termination) == (*sizes, termination)
    model.learn(model.random_timesteps, out=tmp_path / "run")
    sample = model.get_env()
    obs, _ = sample.reset(seed=0)
    act, _ = model.predict(obs)
    assert sample.action_space.contains(act.astype(sample.action_space.dtype))
    assert np.isfinite(model.evaluate(1))
    assert {"termination/learned", "termination/precision", "termination/recall"} <= set(columns(tmp_path / "run"))


def columns(folder) -> list[str]:
    return (folder / "progress.csv").read_text().splitlines()[0].split(",")


def progress_values(folder, name: str) -> list[float]:
    lines = [line.split(",") for line in (folder / "progress.csv").read_text().splitlines()]
    return [float(line[lines[0].index(name)]) for line in lines[1:]]


class Ends(Cart):
    ends_past = 0.15


class Wrong(Cart):
    """Ends later than its rule says."""

    ends_past = 0.3

    def is_terminal(self, next_obs):
        return past(next_obs)


def past(next_obs):
    return abs(next_obs[..., 0]) > 0.15


def reward(obs, act, next_obs):
    return -(next_obs[..., 0] ** 2)


def test_a_rule_that_the_environment_contradicts_is_given_up(tmp_path, said):
    model = dh.DHMBPO(Wrong, config=limited(), termination_rule=past, reward=reward)
    assert model.spec.termination == "known"
    model.learn(40, out=tmp_path / "run")
    assert len([line for line in said if "rule is wrong" in line]) == 1
    assert set(progress_values(tmp_path / "run", "termination/learned")) == {1.0}
    assert model.spec.termination == "learned"


@pytest.mark.slow
def test_a_rule_that_was_given_up_stays_so(tmp_path, said):
    dh.DHMBPO(Wrong, config=limited()).learn(40).save(tmp_path / "agent")
    again = dh.DHMBPO.load(tmp_path / "agent", env=Wrong)
    assert again.spec.termination == "learned"
    again.learn(20)


@pytest.mark.slow
def test_a_rule_that_was_asked_for_is_not_given_up(only_collecting):
    with pytest.raises(dh.UserError, match="contradicts the environment"):
        dh.DHMBPO(Wrong, config=limited(termination="known")).learn(20)
    dh.DHMBPO(Wrong, config=limited(termination="never")).learn(20)


def test_rounding_does_not_make_a_rule_wrong():
    from doublehorizon.training.env_checks import contradictions

    rule = lambda obs: obs[..., 0] > 0.7  # noqa: E731
    obs = np.array([[0.7], [0.7000001], [0.71], [0.69]], np.float32)
    said = np.array([True, False, False, False])
    assert contradictions(rule, obs, said).tolist() == [False, False, True, False]


def test_a_users_rule_and_reward_are_used(said, tmp_path):
    model = dh.DHMBPO(Ends, config=limited(), termination_rule=past, reward=reward)
    assert model.spec.termination == "known"
    model.learn(40)
    assert said == []
    model.save(tmp_path / "agent")
    with pytest.raises(dh.UserError, match=r"pass it again.*termination_rule"):
        dh.DHMBPO.load(tmp_path / "agent", env=Ends, reward=reward)
    with pytest.raises(dh.UserError, match=r"pass it again.*reward"):
        dh.DHMBPO.load(tmp_path / "agent", env=Ends, termination_rule=past)


def test_a_users_functions_are_checked(said, only_collecting):
    dh.DHMBPO(Ends, config=limited(), reward=lambda obs, act, next_obs: act[..., 0]).learn(20)
    assert len(said) == 1 and "reward function differs" in said[0]
    for wrong, words in (
        ({"reward": lambda obs, act, next_obs: np.sin(obs[:, 0])}, "operators, array methods or jax.numpy"),
        ({"reward": lambda obs, act, next_obs: obs}, r"for arrays \[2, 3, n\] it returned"),
        ({"termination_rule": lambda obs: bool(obs[0, 0] > 1)}, "termination rule of"),
    ):
        with pytest.raises(dh.UserError, match=words) as problem:
            dh.DHMBPO(Ends, config=limited(), **wrong).learn(20)
        assert "\n" not in str(problem.value)


def test_a_seed_policy_acts_before_the_first_fit(tmp_path, only_collecting):
    kept = []
    towards_zero = lambda seen: np.array([0.5 if seen["place"][0] < 0 else -0.5])  # noqa: E731
    model = dh.DHMBPO(DictCart, config=limited(), seed_policy=towards_zero)
    model.learn(20, callback=lambda progress: kept.append(progress))
    np.testing.assert_allclose(np.abs(kept[0].replay.rows.act[0, :20]), 0.5)
    with pytest.raises(dh.UserError, match="policy for the first steps returned"):
        dh.DHMBPO(Cart, config=limited(), seed_policy=lambda seen: [np.nan]).learn(20)
    fetch_policies(kept[0].setup, kept[0].agent)[0].save(tmp_path / "policy.safetensors")
    dh.DHMBPO(Cart, config=limited(), seed_policy=tmp_path / "policy.safetensors").learn(20)


@pytest.mark.slow
def test_where_steps_are_dear_nothing_is_tested_and_nothing_random_done(only_collecting, tmp_path):
    """The first test acts with the seed policy as well, or there is none."""
    still = lambda seen: np.zeros(1)  # noqa: E731
    returns = dh.DHMBPO(Tiring, config=limited(), seed_policy=still).learn(20).last_returns()
    assert returns[0] == 0.0
    assert dh.DHMBPO(Tiring, config=limited()).learn(20).last_returns()[0] < 0.0
    config = limited(loop=dataclasses.replace(TINY.loop, evaluation_episodes=0))
    assert dh.DHMBPO(Cart, config=config).learn(20, out=tmp_path / "run").last_returns() == {}
    assert len((tmp_path / "run" / "eval.csv").read_text().splitlines()) == 1


def test_without_random_steps_a_file_is_needed():
    config = limited(loop=dataclasses.replace(TINY.loop, seed_iterations=0))
    with pytest.raises(dh.UserError, match="something to learn from"):
        dh.DHMBPO(Cart, config=config).learn(20)


def recording(tmp_path, num_rows: int):
    rng = np.random.default_rng(0)
    obs, act = rng.normal(size=(num_rows, 3)), rng.uniform(-1, 1, (num_rows, 1))
    rows = {
        "obs": obs,
        "act": act,
        "reward": -(obs[:, 0] ** 2),
        "next_obs": obs + 0.1,
        "terminated": np.zeros(num_rows),
    }
    np.savez(tmp_path / "log.npz", **rows)
    return dh.DHMBPO(Cart, config=limited(), data=tmp_path / "log.npz")


@pytest.mark.slow
def test_recorded_steps_come_first_and_nothing_random(tmp_path, capfd):
    model = recording(tmp_path, 123)
    assert model.random_timesteps == 0
    seen = []
    model.learn(40, out=tmp_path / "run", callback=lambda progress: seen.append(progress.num_rows), progress_bar=True)
    assert seen == [140, 160]
    captured = capfd.readouterr()
    assert (captured.out + captured.err).count("the whole run takes at most") == 1
    assert json.loads((tmp_path / "run" / "config.json").read_text())["given"] == ["data"]
    assert progress_values(tmp_path / "run", "time/total_timesteps") == [0.0, 20.0, 40.0]


@pytest.mark.slow
def test_a_run_from_recorded_steps_can_be_saved(tmp_path):
    recording(tmp_path, 123).learn(40).save(tmp_path / "agent")
    again = dh.DHMBPO.load(tmp_path / "agent", env=Cart)
    again.learn(20)
    assert again._progress.num_rows == 180


def test_several_environments_share_an_iterations_steps(only_collecting):
    config = limited(loop=dataclasses.replace(TINY.loop, num_envs=3, seed_iterations=3))
    one = dh.DHMBPO(Cart, config=limited()).learn(20)._progress.replay.rows
    three = dh.DHMBPO(Cart, config=config).learn(40)._progress.replay.rows
    np.testing.assert_array_equal(one.obs[0, :7], three.obs[0, :7])  # 7, 7 and 6 steps; the first as if alone
    linked = np.isclose(three.next_obs[0, :-1], three.obs[0, 1:]).all(axis=1)
    assert set(np.flatnonzero(~linked[:20])) == {6, 13, 19}
    # the second iteration goes on where each environment stood
    np.testing.assert_array_equal(three.next_obs[0, 6], three.obs[0, 20])
    np.testing.assert_array_equal(three.next_obs[0, 13], three.obs[0, 27])
    with pytest.raises(dh.UserError, match="environment object serves one seed"):
        dh.DHMBPO(Cart(), config=config)
