"""What people get wrong in their first hour, each with the line that it is answered with."""

import shlex
import zipfile
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

import doublehorizon as dh
from doublehorizon.algorithm.end_rewards import unknown_end_rewards
from doublehorizon.analysis.model_error import accuracy
from doublehorizon.cli import _status
from doublehorizon.cli.eval import Eval
from doublehorizon.cli.parsing import filled, parse
from doublehorizon.cli.train import Train
from doublehorizon.envs.gym_check import complaints
from doublehorizon.envs.make import Simulator, describe, make
from test_model_error import line_rows
from worlds import TINY, line_world


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("Pendulum-v1 --gamma 0.9", "There is no option --gamma. Perhaps --policy.discount?"),
        ("Pendulum-v1 --n-envs 3", "There is no option --n-envs. Perhaps --num-envs?"),
        (
            "Pendulum-v1 --policy.learning-rat 1",
            "There is no option --policy.learning-rat. Perhaps --policy.learning-rate",
        ),
        ("Pendulum-v1 --zzz 1", "There is no option --zzz. `doublehorizon train --help`"),
        ("Pendulum-v1 two words", "There is no place for two, words."),
        ("Pendulum-v1 --steps many", "--steps: many is no whole number."),
        ("Pendulum-v1 --steps 1.5", "--steps: 1.5 is no whole number."),
        ("Pendulum-v1 --critic.bounds foo", "invalid choice 'foo' for argument '--critic.bounds'."),
        ("Pendulum-v1 --model.dropout 0.1 0.2", "Expected 3 values."),
        ("", "ENV is missing: A Gymnasium id"),
    ],
)
def test_wrong_words_are_answered_in_one_line(words, line):
    with pytest.raises(dh.UserError) as problem:
        parse(Train, "train", "", words.split())
    assert line in str(problem.value) and "\n" not in str(problem.value) and "│" not in str(problem.value)


def test_help_is_running_text_that_fits_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse(Eval, "eval", f"{'word ' * 40}\n\nexamples:\n  {'command ' * 20}", ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("  ")) <= 80
    assert any(line.count("command") == 20 for line in lines)  # stays whole: it is copied
    text = " ".join("".join(lines).replace("│", " ").split())
    assert "module:function that makes the environment, if the run was trained on one; or another environment" in text
    assert filled("a b") == "a b"
    with pytest.raises(SystemExit):
        parse(Train, "train", "", ["--help"])
    assert "being HalfCheetah, Hopper" in capsys.readouterr().out  # the source has a line's end between the two


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("robot", "there is robot.py: name the function in it that makes the environment, robot:FUNCTION."),
        ("robot.py", "robot:FUNCTION."),
        ("robot.py:make_env", "there is robot.py: name the function in it that makes the environment, robot:make_env."),
        ("./robot.py:make_env", "robot:make_env."),
        ("robot:make_en", "there is no function in robot 'make_en'. Did you mean 'make_env'? Choose one of: make_env."),
        ("robots:make_env", "'robots:make_env' cannot be imported: No module named 'robots'."),
    ],
)
def test_a_file_or_a_wrong_function_instead_of_module_and_function(tmp_path, monkeypatch, name, line):
    (tmp_path / "robot.py").write_text("def make_env():\n    return None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(dh.UserError) as problem:
        make(name)
    assert line in str(problem.value)


class Named(gym.Env):
    """Has entries with names, and can be told what to return."""

    observation_space = Dict(
        {"speed": Box(-9.0, 9.0, (1,), np.float32), "arm": Box(-9.0, 9.0, (2,), np.float32), "gear": Discrete(2)}
    )
    action_space = Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, arm=(0.0, 0.0), reward=0.0):
        self.arm, self.reward = arm, reward

    def _obs(self, arm=(0.0, 0.0)):
        return {"speed": np.zeros(1, np.float32), "arm": np.array(arm, np.float32), "gear": np.int64(1)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action):
        return self._obs(self.arm), self.reward, False, False, {}


def test_numbers_of_an_observation_have_the_names_of_their_entries():
    spec = describe(Named())
    assert spec.obs_names == ["arm[0]", "arm[1]", "gear[0]", "gear[1]", "speed"]
    assert describe(gym.make("Pendulum-v1")).obs_names == ["o0", "o1", "o2"]
    env = Named(arm=(0.0, np.nan))
    simulator = Simulator(env, spec)
    simulator.reset(0)
    with pytest.raises(dh.UserError, match=r"not finite in step 1 of an episode: arm\[1\] is nan\."):
        simulator.step(np.zeros(1))


def test_a_reward_that_is_not_finite_is_told_before_gymnasium_calls_it_random():
    with pytest.raises(dh.UserError, match="returned the reward nan in its first step"):
        complaints(Named(reward=float("nan")), "Named")


def test_a_saved_agent_is_called_by_its_own_name_and_has_a_policy(tmp_path):
    model = dh.DHMBPO(lambda: gym.make("Pendulum-v1"), seeds=2, config=TINY.with_(termination="never")).learn(40)
    for path in (tmp_path / "agent.zip", tmp_path / "agent"):
        model.save(path)
        for name, values in dh.load_policy(path).arrays().items():
            np.testing.assert_array_equal(values, model.policies[0].arrays()[name])
        with pytest.raises(dh.UserError) as problem:
            dh.DHMBPO.load(path)
        assert str(problem.value).startswith(f"{path} was not trained on a registered id")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("policy/readme", "nothing")
    (tmp_path / "text.zip").write_text("text")
    for name, line in (
        ("other.zip", "holds no policy"),
        ("text.zip", "cannot be read as an agent"),
        ("no.zip", "No such"),
    ):
        with pytest.raises(dh.UserError, match=line) as problem:
            dh.load_policy(tmp_path / name)
        assert str(problem.value).startswith(str(tmp_path / name))


def test_a_complete_run_says_how_it_goes_on(copy, capsys):
    assert _status(["resume", str(copy)]) == 0
    out, err = capsys.readouterr()
    assert "final test return" in out
    assert (
        f"is complete: it was started for 100 steps. To go on: doublehorizon resume {shlex.quote(str(copy))} --steps N"
        in err
    )
    assert _status(["resume", str(copy), "--steps", "20"]) == 2
    assert "stands at step 100 already, but steps is 20: give more." in capsys.readouterr().err


def test_rewards_of_ends_do_not_count_against_a_model_that_does_not_learn_them():
    """They are learnt apart where an episode can end."""
    rows = line_rows(50)
    fined = type(rows)(rows.obs, rows.act, rows.reward.at[7].add(-100.0), rows.next_obs, rows.terminated.at[7].set(1.0))
    world = line_world()
    alone = accuracy(TINY, world, fined)
    np.testing.assert_allclose(alone.rmse[0], 100.0 / np.sqrt(50), rtol=1e-3)
    apart = replace(world, end_rewards=unknown_end_rewards())
    assert accuracy(TINY, apart, fined).rmse[0] < 1e-4
    assert accuracy(TINY.with_(terminator__rewards=False), apart, fined).rmse[0] > 10.0
