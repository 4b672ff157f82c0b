import json

import gymnasium as gym
import numpy as np
import pytest

import doublehorizon as dh
from doublehorizon.config import Config, FitConfig, LoopConfig
from doublehorizon.config_json import from_json, to_json
from worlds import TINY


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two seeds of a tiny agent on Pendulum, with its run folder."""
    folder = tmp_path_factory.mktemp("api") / "run"
    return dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY).learn(80, out=folder), folder


def test_a_run_folder_holds_what_it_should(trained):
    model, folder = trained
    config = json.loads((folder / "config.json").read_text())
    assert from_json(config["config"]) == TINY and config["env"]["name"] == "Pendulum-v1"
    rows = [line.split(",") for line in (folder / "eval.csv").read_text().splitlines()]
    assert rows[0] == ["step", "time", "reward", "seed"]
    # at 0, after the first fit (40), at multiples of two iterations, and at the end
    assert sorted((int(row[0]), int(row[3])) for row in rows[1:]) == [(s, k) for s in (0, 40, 80) for k in (0, 1)]
    progress = (folder / "progress.csv").read_text().splitlines()
    assert len(progress) == 1 + 2 * 3 and "model/epochs" in progress[0] and "train/critic_loss" in progress[0]
    assert sorted(p.name for p in (folder / "policy").iterdir()) == [
        "best.json",
        "best.safetensors",
        "returns.json",
        "seed0.safetensors",
        "seed1.safetensors",
    ]
    assert model.num_timesteps == 80


def test_predict_uses_the_seed_with_the_best_last_return_as_load_policy_does(trained):
    model, folder = trained
    returns = model.last_returns()
    best = max(returns, key=returns.__getitem__)
    obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    np.testing.assert_array_equal(model.predict(obs)[0], model.policies[best].predict(obs)[0])
    np.testing.assert_array_equal(dh.load_policy(folder).predict(obs)[0], model.predict(obs)[0])
    noisy = [model.predict(obs, deterministic=False)[0] for _ in range(2)]
    assert not np.array_equal(*noisy)


def test_evaluate_is_the_mean_return_of_its_policy(trained):
    model, _ = trained
    assert -2000.0 < model.evaluate(2) < 0.0
    assert model.evaluate(2) == model.evaluate(2)


def test_predict_keeps_stable_baselines_habits(trained):
    # as stable_baselines3.common.evaluation.evaluate_policy calls it
    model, _ = trained
    env = gym.make_vec("Pendulum-v1", num_envs=3, vectorization_mode="sync")
    obs, _ = env.reset(seed=0)
    action, state = model.predict(obs, state=None, episode_start=np.ones(3, bool), deterministic=True)
    env.step(action)
    assert action.shape == (3, 1) and state is None


def test_a_saved_agent_goes_on_learning(trained, tmp_path):
    model, _ = trained
    model.save(tmp_path / "agent")
    loaded = dh.DHMBPO.load(tmp_path / "agent")
    obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    np.testing.assert_array_equal(loaded.predict(obs)[0], model.predict(obs)[0])
    assert loaded.num_timesteps == 80
    loaded.learn(20)
    assert loaded.num_timesteps == 100
    assert not np.array_equal(loaded.predict(obs)[0], model.predict(obs)[0])


def test_an_agent_is_saved_again_in_the_same_place(trained, tmp_path):
    model, run = trained
    for _ in range(2):
        model.save(tmp_path / "agent")
    assert [path.name for path in tmp_path.iterdir()] == ["agent"]
    with pytest.raises(dh.UserError, match="obs_size"):
        dh.DHMBPO.load(tmp_path / "agent", env="InvertedPendulum-v5")
    with pytest.raises(dh.UserError, match="holds a run"):
        model.save(run)


def test_an_agent_of_an_unregistered_environment_needs_it_again(tmp_path, only_collecting):
    model = dh.DHMBPO(lambda: gym.make("Pendulum-v1"), config=TINY).learn(20)
    model.save(tmp_path / "agent")
    with pytest.raises(dh.UserError, match="env="):
        dh.DHMBPO.load(tmp_path / "agent")
    assert dh.DHMBPO.load(tmp_path / "agent", env="Pendulum-v1").num_timesteps == 20
    with pytest.raises(dh.UserError, match="nothing was learnt"):
        model.predict(np.zeros(3))  # random steps only


def test_an_environment_object_serves_one_seed_in_this_process():
    env = gym.make("Pendulum-v1")
    model = dh.DHMBPO(env, config=TINY).learn(60)
    assert model.num_timesteps == 60 and np.isfinite(model.evaluate(1))
    with pytest.raises(dh.UserError, match="one seed"):
        dh.DHMBPO(env, seeds=2)


def test_a_callback_sees_each_iteration_and_can_stop():
    steps = []

    def callback(progress):
        steps.append(progress.step)
        return len(steps) < 2

    never = TINY.with_(termination="never")
    dh.DHMBPO(lambda: gym.make("Pendulum-v1"), seeds=2, config=never).learn(100, callback=callback)
    assert steps == [20, 40]


def test_steps_that_were_all_random_are_told(monkeypatch):
    told = []
    monkeypatch.setattr("doublehorizon.training.live_view.View.say", lambda self, line: told.append(line))
    model = dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY).learn(20)
    words = "20 steps were all random, nothing is learnt yet: that begins after 40 of them"
    assert told.count(words) == 1
    model.learn(20)
    assert told.count(words) == 1 and len(model.policies) == 2


def test_mistakes_are_told_in_one_line(tmp_path, trained):
    _, folder = trained
    for wrong, words in (
        (lambda: dh.DHMBPO("Pendulum-v1", seeds=0), "seeds is 0"),
        (lambda: dh.DHMBPO("Pendulum-v1", device="abacus"), "abacus"),
        (lambda: dh.DHMBPO("Pendulum-v1").learn(0), "total_timesteps is 0"),
        (lambda: dh.DHMBPO("Pendulum-v1").predict(np.zeros(3)), "learn"),
        (lambda: dh.DHMBPO("Pendulum-v1", config=TINY).learn(20, out=folder), "already holds a run"),
        (lambda: Config(fit=FitConfig(batch_size=0)), "fit.batch_size is 0"),
        (lambda: Config(loop=LoopConfig(steps_per_iteration=30)), "multiple of 20"),
        (lambda: from_json({"fit": {"speed": 3}}), "no field 'speed'"),
        (lambda: from_json({"precision": "float12"}), "float12"),
        (lambda: from_json({"fit": {"batch_size": "many"}}), "fit.batch_size is 'many'.*int"),
        (lambda: from_json({"model": {"dropout": [0.1]}}), "3 numbers"),
        (lambda: from_json({"model": {"dropout": [0.1, 1.5, 0]}}), "below 1"),
        (lambda: from_json({"loop": 3}), "group of named values"),
        (lambda: dh.DHMBPO("Pendulum-v1", seed=2**31), "seed is"),
    ):
        with pytest.raises(dh.UserError, match=words) as problem:
            wrong()
        assert "\n" not in str(problem.value)


def test_a_config_survives_json():
    assert from_json(json.loads(json.dumps(to_json(TINY)))) == TINY
    assert from_json({}) == Config()
