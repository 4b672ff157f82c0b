"""Returns of training episodes: counted by hand, across calls and processes."""

import numpy as np

import doublehorizon as dh
from doublehorizon.acting import env_runner
from doublehorizon.acting.env_runner import EnvRunner
from doublehorizon.acting.workers import WorkerPool
from doublehorizon.envs.make import Simulator, describe, make
from doublehorizon.run.run_reader import read_rows
from doublehorizon.training.train import _any, _training_episodes
from worlds import TINY


def runner(**values) -> EnvRunner:
    env = make("Pendulum-v1")
    return EnvRunner(Simulator(env, describe(env)), seed=3, **values)


def test_an_episodes_return_is_the_sum_of_its_rewards_across_calls_and_processes():
    one = runner()
    first, second = one.collect(0, None, 450), one.collect(450, None, 150)
    assert [length for _, length in first.ended] == [200, 200] and [length for _, length in second.ended] == [200]
    rewards = np.concatenate([first.batch["reward"], second.batch["reward"]])
    totals = [total for total, _ in first.ended + second.ended]
    np.testing.assert_allclose(totals, rewards.reshape(3, 200).sum(axis=1), rtol=1e-5)
    elsewhere = runner().collect(450, None, 150, first.episode)  # another process goes on with the episode
    assert elsewhere.exact and elsewhere.ended == second.ended


def test_an_episode_that_is_random_for_once_does_not_count(monkeypatch):
    monkeypatch.setattr(env_runner, "is_random_episode", lambda *_: True)
    assert runner(random_episodes=True).collect(0, None, 200).ended == []


def test_the_mean_is_of_the_episodes_that_ended():
    pool = WorkerPool.__new__(WorkerPool)
    pool.seeds, pool.ended = [4, 5, 6], {4: [(10.0, 3), (20.0, 5)], 5: [], 6: [(1.0, 7)]}
    found = _training_episodes(pool)
    np.testing.assert_array_equal(found["rollout/ep_rew_mean"], [15.0, np.nan, 1.0])
    np.testing.assert_array_equal(found["rollout/ep_len_mean"], [4.0, np.nan, 7.0])


def test_a_run_logs_them(tmp_path):
    dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY.with_(loop__time_limit=60)).learn(80, out=tmp_path / "run")
    rows = [row for row in read_rows(tmp_path / "run" / "progress.csv") if row["seed"] == "1"]
    lengths = {int(row["time/total_timesteps"]): float(row["rollout/ep_len_mean"]) for row in rows}
    assert lengths[60] == 60.0 and np.isnan(lengths[40]) and np.isnan(lengths[80])
    assert float(next(row for row in rows if row["time/total_timesteps"] == "60")["rollout/ep_rew_mean"]) < 0.0
    assert _any(np.array([np.nan, 1.0])) and not _any(np.array([np.nan]))
