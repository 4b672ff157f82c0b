"""What people bring along: recorded transitions with names, controllers of their own, numbers of NumPy's, files."""

import json

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import doublehorizon as dh
from doublehorizon.acting.env_runner import EnvRunner
from doublehorizon.acting.recorded_data import load_transitions, longest_recorded_cut
from doublehorizon.analysis.export import export_policy
from doublehorizon.cli import _status
from doublehorizon.cli.train import config_named_in
from doublehorizon.config_json import read_config
from doublehorizon.envs.make import Simulator, describe
from doublehorizon.errors import UserError
from doublehorizon.run.run_reader import read_rows
from worlds import TINY


class Boiler(gym.Env):
    """Named observations, actions in [0, 5]; episodes are cut off after 10 steps, which nobody says."""

    observation_space = spaces.Dict(
        {"warmth": spaces.Box(-10, 10, (2,), np.float32), "clock": spaces.Box(0, 1, (), np.float32)}
    )
    action_space = spaces.Box(0.0, 5.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.warmth = 0, float(self.np_random.uniform(-1, 1))
        return self._seen(), {}

    def step(self, action):
        self.t += 1
        self.warmth = 0.9 * self.warmth + 0.1 * float(action[0])
        return self._seen(), -abs(self.warmth), False, self.t == 10, {}

    def _seen(self):
        return {"warmth": np.array([self.warmth, 0.0], np.float32), "clock": np.array(self.t / 10, np.float32)}


SPEC = describe(Boiler())


def recorded(num_steps: int = 120) -> dict[str, np.ndarray]:
    batch = EnvRunner(Simulator(Boiler(), SPEC), seed=0).collect(0, None, num_steps).batch
    return batch | {"act": 2.5 * (batch["act"] + 1.0)}


def test_recorded_observations_may_have_names(tmp_path):
    rows = recorded()
    assert SPEC.obs_names == ["clock", "warmth[0]", "warmth[1]"]
    named = {key: {"warmth": rows[key][:, 1:], "clock": rows[key][:, 0]} for key in ("obs", "next_obs")}
    np.savez(tmp_path / "log.npz", **{f"{k}.{n}": x for k, d in named.items() for n, x in d.items()} | {
        name: rows[name] for name in ("act", "reward", "terminated")
    })  # fmt: skip
    flat = load_transitions(rows, SPEC, 5)
    for source in (rows | named, tmp_path / "log.npz"):
        found = load_transitions(source, SPEC, 5)
        assert all(np.array_equal(found[name], flat[name]) for name in flat)


def test_what_is_wrong_with_recorded_arrays_names_the_array(tmp_path):
    rows = recorded()
    (tmp_path / "b.log").write_text("hello")
    for source, words in (
        (rows | {"reward": rows["reward"][:119]}, "119 rows of reward, but 120 of obs"),
        (rows | {"reward": ["a"] * 120}, "something else as reward, but an array of numbers"),
        (rows | {"act": {"a": 1}}, "a dict as act"),
        (rows | {"obs": rows["obs"][:5, :1]}, r"obs of the shape \(5, 1\).*needs \(5, 3\): clock, warmth"),
        (tmp_path / "b.log", r"b.log cannot be read as an .npz file of transitions: it is none\.$"),
    ):
        with pytest.raises(UserError, match=words):
            load_transitions(source, SPEC, 5)


def test_the_length_of_recorded_episodes_is_seen():
    rows = recorded()
    assert longest_recorded_cut(rows) == 10
    assert longest_recorded_cut({name: x[:12] for name, x in rows.items()}) == 10  # the first is the only whole one
    order = np.random.default_rng(0).permutation(120)
    assert longest_recorded_cut({name: x[order] for name, x in rows.items()}) == 0  # nothing follows anything
    ended = rows | {"terminated": (np.arange(120) % 10 == 9).astype(np.float32)}
    assert longest_recorded_cut(ended) == 0  # they ended by themselves
    short = {name: x[:7] for name, x in rows.items()}
    assert longest_recorded_cut(short) == 0  # one episode, not over


def test_a_run_on_recorded_steps_takes_the_discount_of_their_episodes(said, monkeypatch, only_collecting):
    seen = []

    def learn(progress, *_):
        seen.append(progress.task.episode_steps)
        raise KeyboardInterrupt

    monkeypatch.setattr("doublehorizon.training.train.learn", learn)
    model = dh.DHMBPO(Boiler, config=TINY.with_(policy__discount=None), data=recorded())
    with pytest.raises(KeyboardInterrupt):
        model.learn(20)
    assert seen == [10]
    assert "config.with_(loop__time_limit=...)" in said[0]


def test_a_run_on_recorded_steps_logs_its_training_returns(tmp_path, monkeypatch, only_collecting):
    """The first row, which has none yet, decides the columns."""

    def learn(progress, clock, view):
        for phase in ("fit", "improve"):
            clock.lap(f"time/{phase}_seconds")
        return {"train/repeats": np.zeros(1)}

    monkeypatch.setattr("doublehorizon.training.train.learn", learn)
    config = TINY.with_(loop__time_limit=10, termination="never")
    dh.DHMBPO(Boiler, config=config, data=recorded()).learn(40, out=tmp_path / "run")
    rows = read_rows(tmp_path / "run" / "progress.csv")
    assert [row["rollout/ep_rew_mean"] == "nan" for row in rows] == [True, False, False]
    assert [float(row["rollout/ep_len_mean"]) for row in rows[1:]] == [10.0, 10.0]
    assert float(rows[2]["time/waited_seconds"]) > 0.0


@pytest.fixture(scope="module")
def learnt() -> dh.DHMBPO:
    config = TINY.with_(loop__time_limit=10, termination="never")  # nothing is to be noted
    return dh.DHMBPO(Boiler, config=config).learn(np.int64(60))


def test_an_observation_that_is_not_finite_gets_no_action(learnt, tmp_path):
    seen = {"warmth": np.array([np.nan, 0.0]), "clock": 0.5}
    with pytest.raises(UserError, match=r"the observation has warmth\[0\] nan, but this policy needs finite"):
        learnt.predict(seen)
    with pytest.raises(UserError, match="the observation's warmth is text"):
        learnt.predict(seen | {"warmth": ["a", "b"]})
    export_policy(learnt.policies[0], tmp_path / "p.npz")
    scope: dict = {}
    exec((tmp_path / "p.py").read_text(), scope)
    act = scope["Policy"](tmp_path / "p.npz")
    assert np.isfinite(act(seen | {"warmth": np.zeros(2)})).all()
    with pytest.raises(ValueError, match="not finite"):
        act(seen)
    with pytest.raises(UserError, match="was exported for use elsewhere"):
        dh.load_policy(tmp_path / "p.npz")


def test_a_seed_policy_that_cannot_act_or_fails_is_told():
    with pytest.raises(UserError, match="seed_policy is 3, but a function"):
        dh.DHMBPO(Boiler, config=TINY, seed_policy=3)

    def broken(obs):
        raise KeyError("sensor")

    runner = EnvRunner(Simulator(Boiler(), SPEC), seed=0, seed_policy=broken)
    with pytest.raises(UserError, match=r"the seed policy raised KeyError\('sensor'\), in broken .*seed 0, step 0"):
        runner.collect(0, None, 5)


def test_what_cannot_be_written_or_tracked_is_told_before_the_first_step(learnt, tmp_path, capsys):
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "policy.safetensors"
    with pytest.raises(UserError, match=r"policy.safetensors cannot be written: "):
        learnt.learn(20, callback=dh.callbacks.SaveBest(below))
    with pytest.raises(UserError, match="trackers has 3, but"):
        learnt.learn(20, trackers=[3])  # type: ignore[list-item]
    learnt.policies[0].save(tmp_path / "p.safetensors")
    assert _status(["export", str(tmp_path / "p.safetensors"), str(tmp_path / "file" / "p.npz")]) == 2
    assert "p.npz cannot be written" in capsys.readouterr().err
    (tmp_path / "c.csv").write_text("step,reward,seed\n0,1,0\n10,2,0\n")
    assert _status(["plot", str(tmp_path / "c.csv"), "--out", str(tmp_path / "file" / "c.png")]) == 2
    said = capsys.readouterr().err
    assert "c.png cannot be written: " in said and ".svg" not in said
    assert _status(["plot", str(tmp_path / "c.csv"), "--out", str(tmp_path / "c.png")]) == 0
    assert "2.0 (one seed) at 10" in capsys.readouterr().out
    (tmp_path / "c.csv").write_text("step,reward,seed\n0,1,0\n0,2,1\n")
    assert _status(["compare", str(tmp_path / "c.csv"), str(tmp_path / "c.csv")]) == 2
    assert "tested before the first step alone: train them longer" in capsys.readouterr().err


def test_numbers_of_numpys_are_numbers():
    config = TINY.with_(policy__learning_rate=np.float32(0.5), policy__width=np.int64(64))
    assert type(config.policy.learning_rate) is float and type(config.policy.width) is int
    json.dumps(config.policy.learning_rate)
    with pytest.raises(UserError, match=r"policy is \{'width': 3\}.*config.with_\(policy__...=...\)"):
        dh.Config(policy={"width": 3})  # type: ignore[arg-type]


def test_a_file_changes_some_values_of_a_preset(tmp_path):
    some, whole = tmp_path / "some.json", tmp_path / "config.json"
    some.write_text('{"policy": {"discount": 0.9}, "model": {"dropout": [0, 0, 0.5]}}')
    wanted = dh.presets.quick.with_(policy__discount=0.9, model__dropout=(0.0, 0.0, 0.5))
    assert config_named_in(["--preset", "quick", "--config", str(some)]) == wanted
    assert read_config(some).policy.width == dh.Config().policy.width
    assert dh.DHMBPO(Boiler, config=str(some)).config.policy.discount == 0.9
    whole.write_text('{"config": {"policy": {}}}')
    with pytest.raises(UserError, match="nothing left for --preset"):
        config_named_in(["--preset=quick", f"--config={whole}"])
    some.write_text('{"policy": {"foo": 1}}')
    with pytest.raises(UserError, match=r"some.json.policy has no field 'foo'"):
        read_config(some)
