"""`bench-model`: what models say of the transitions that come next."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from doublehorizon.analysis import replay_forward as forward
from doublehorizon.analysis.replay_forward import Plan, Rows, read_rows, replay_forward
from doublehorizon.cli import _status
from doublehorizon.cli.bench_model import _tried
from doublehorizon.config_json import changed
from doublehorizon.errors import UserError
from doublehorizon.presets import PRESETS
from linear_world import problem
from worlds import TINY

LITTLE = changed(
    TINY,
    {"fit.batches_per_step": 2.0, "fit.learning_rate": 1e-2, "fit.first_effort": None, "loop.steps_per_iteration": 20},
)


def linear_rows(count: int = 205) -> Rows:
    """One long trajectory of a linear world."""
    rng = np.random.default_rng(0)
    act = rng.uniform(-1, 1, (count, 1)).astype(np.float32)
    obs = np.zeros((count + 1, 2), np.float32)
    for t in range(count):
        obs[t + 1] = obs[t] * [0.9, 0.8] + [act[t, 0], obs[t, 0]]
    reward = obs[:-1, 0] + act[:, 0]
    return {
        "obs": obs[:-1],
        "act": act,
        "reward": reward,
        "next_obs": obs[1:].copy(),
        "terminated": np.zeros(count, np.float32),
    }


def test_answers_are_those_of_each_member_by_hand():
    replay, world = jax.tree.map(lambda x: x[0], problem(1))
    rows = jax.tree.map(lambda x: x[:25], replay.rows)
    unit = np.array([2.0, 1.0, 0.5, 3.0], np.float32)
    answer, open_loop = forward._ask(world, rows, jnp.asarray(unit), False)

    std, members = (
        np.asarray(world.target_normalizer.std),
        [jax.tree.map(lambda x, k=k: x[k], world.members) for k in (0, 1)],
    )

    def predicted(member, obs):
        inputs = jnp.concatenate([world.obs_normalizer.normalize(obs), act], axis=-1)
        mean, log_noise = member(inputs)
        return np.asarray(world.target_normalizer.denormalize(mean)), np.exp(np.asarray(log_noise)) * std

    act = rows.act[:20]
    target = np.concatenate([rows.reward[:20, None], (rows.next_obs - rows.obs)[:20]], axis=1)
    each = [predicted(member, rows.obs[:20]) for member in members]
    means = np.stack([mean for mean, _ in each])
    assert answer["member"] == pytest.approx(np.mean(((means - target) / unit) ** 2), rel=1e-3)
    assert answer["mean"] == pytest.approx(np.mean(((means.mean(0) - target) / unit) ** 2), rel=1e-3)
    assert answer["reward"] == pytest.approx(np.mean(((means - target) / unit)[..., 0] ** 2), rel=1e-3)
    assert answer["disagreement"] == pytest.approx(np.mean(means.var(0, ddof=1) / unit**2), rel=1e-3)
    variance = np.mean([noise**2 for _, noise in each], axis=0) + means.var(0, ddof=1)
    assert answer["calibration"] == pytest.approx(np.mean((means.mean(0) - target) ** 2 / variance), rel=1e-3)
    # likelihoods are in the common units, and without their constant
    constant = 4 * 0.5 * np.log(2 * np.pi)
    nll = [
        -stats.norm(mean / unit, noise / unit).logpdf(target / unit).sum(-1).mean() - constant for mean, noise in each
    ]
    assert answer["member_nll"] == pytest.approx(np.mean(nll), rel=1e-3)
    one = stats.norm(means.mean(0) / unit, np.sqrt(variance) / unit)
    assert answer["ensemble_nll"] == pytest.approx(-one.logpdf(target / unit).sum(-1).mean() - constant, rel=1e-3)
    # the open loop, step by step
    off = []
    for member in members:
        obs = rows.obs[:20]
        for t in range(5):
            act = rows.act[t : t + 20]
            obs = obs + predicted(member, obs)[0][:, 1:]
        off.append(np.square(np.asarray(obs - rows.obs[5:]) / np.asarray(world.obs_normalizer.std)).mean(-1))
    np.testing.assert_allclose(open_loop, np.mean(off, axis=0), rtol=1e-3)


def test_open_loops_stay_within_an_episode():
    rows = linear_rows(40)
    assert forward._linked(rows, 10, 20).all()
    rows["terminated"][20] = 1.0
    assert np.flatnonzero(~forward._linked(rows, 10, 20)).tolist() == [6, 7, 8, 9, 10]  # rows 16 to 20
    rows = linear_rows(40)
    rows["obs"][25] += 1.0  # a new episode
    assert np.flatnonzero(~forward._linked(rows, 10, 20)).tolist() == [10, 11, 12, 13, 14]


def test_more_work_predicts_better_and_is_counted():
    rows, plan = linear_rows(), Plan(first=100, scored_from=140, last=200)
    ticks = []
    worked = replay_forward(LITTLE, rows, plan, 0, lambda: ticks.append(None))
    assert len(ticks) == forward.num_fits(LITTLE, plan) == 5  # with 100, 120, 140, 160 and 180 rows
    assert worked.minibatches == 3 * 40  # of those with 140 and more
    lazy = replay_forward(changed(LITTLE, {"fit.batches_per_step": 0.1}), rows, plan, 0)
    assert worked.member_rmse < 0.5 * lazy.member_rmse and worked.open_loop_rmse < lazy.open_loop_rmse
    assert worked.seconds > 0.0


def test_rewards_of_steps_that_terminate_are_measured_apart():
    rows, plan = linear_rows(), Plan(first=100, scored_from=140, last=200)
    before = replay_forward(LITTLE, rows, plan, 0)
    assert np.isnan(before.terminal_reward_rmse)
    unit = rows["reward"][:200].std()
    rows["terminated"][::20], rows["reward"][::20] = 1.0, -200.0
    apart = replay_forward(LITTLE, rows, plan, 0)
    assert apart.reward_rmse < 2 * before.reward_rmse and apart.member_rmse < 2 * before.member_rmse
    assert apart.terminal_reward_rmse < 0.01  # all that it ever saw is -200
    together = replay_forward(changed(LITTLE, {"terminator.rewards": False}), rows, plan, 0)
    assert together.terminal_reward_rmse > 0.1 * 200 / unit and together.reward_rmse > 2 * apart.reward_rmse


def test_models_have_not_seen_what_they_are_asked_about():
    rows, plan = linear_rows(), Plan(first=100, scored_from=180, last=200)
    before = replay_forward(LITTLE, rows, plan, 0)
    rows["reward"][180:] += 100.0  # only asked about, by the last fit
    after = replay_forward(LITTLE, rows, plan, 0)
    assert after.open_loop_rmse == before.open_loop_rmse  # the models are the same
    assert after.reward_rmse > before.reward_rmse


def test_transitions_come_from_a_run_or_a_file(run, tmp_path):
    rows = read_rows(run, 50)
    assert rows["obs"].shape == (50, 3) and rows["act"].shape == (50, 1) and rows["reward"].shape == (50,)
    np.testing.assert_array_equal(rows["next_obs"][:-1], rows["obs"][1:])
    np.savez(tmp_path / "rows.npz", **rows)
    again = read_rows(tmp_path / "rows.npz", 30)
    np.testing.assert_array_equal(again["act"], rows["act"][:30])


def test_what_cannot_be_measured_is_told(run, tmp_path, capsys):
    with pytest.raises(UserError, match="there are 205 transitions, but --last 300 needs 305"):
        replay_forward(LITTLE, linear_rows(), Plan(100, 140, 300), 0)
    with pytest.raises(UserError, match="--first is 101 and --last 200, but multiples of 5 are needed"):
        replay_forward(LITTLE, linear_rows(), Plan(101, 140, 200), 0)
    with pytest.raises(UserError, match="leave nothing to ask about"):
        replay_forward(LITTLE, linear_rows(), Plan(100, 190, 200), 0)
    with pytest.raises(UserError, match="holds no transitions that can be read"):
        read_rows(tmp_path, 10)
    for text in ("fit.size=3", "fit.batch_size", "nothing=1"):
        assert _status(["bench-model", str(run), "--try", text]) == 2
        assert f"--try has '{text}', but NAME=VALUE is needed" in capsys.readouterr().err


def test_values_are_written_as_in_json_or_python():
    text = "model.dropout=[0.1,0.2,0.3] fit.batches_factor=None fit.learning_rate=2e-3 model.noise=state"
    title, config = _tried("light", text)
    assert title == text and _tried("light", f"as written: {text}") == ("as written", config)
    assert config.model.dropout == (0.1, 0.2, 0.3) and config.fit.batches_factor is None
    assert config.fit.learning_rate == 2e-3 and config.model.noise == "state"
    assert _tried("light", "fit.batches_factor=null")[1].fit.batches_factor is None
    assert config.critic == PRESETS["light"].critic


def test_the_command_prints_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(PRESETS, "quick", LITTLE)
    np.savez(tmp_path / "line.npz", **linear_rows())
    call = [
        "bench-model",
        str(tmp_path / "line.npz"),
        "--preset",
        "quick",
        "--try",
        "fit.recent_share=0.1",
        "--first",
        "100",
    ]
    call += ["--scored-from", "160", "--last", "200", "--out", str(tmp_path / "figure.png")]
    assert _status([*call, "--json"]) == 0
    out, err = capsys.readouterr()
    told = [line.split(": ")[1] for line in err.splitlines() if " in " in line]
    assert told == ["quick", "fit.recent_share=0.1"]  # each when it is done
    found = json.loads(out)
    ways = found["replays"][str(tmp_path / "line.npz")]
    assert list(ways) == ["quick", "fit.recent_share=0.1"] and 0 < ways["quick"]["member_rmse"] < 1
    assert ways["quick"]["member_rmse"] != ways["fit.recent_share=0.1"]["member_rmse"]
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert _status(call) == 0
    *_, first, second, path = capsys.readouterr().out.splitlines()
    assert first.split()[0] == f"{ways['quick']['member_rmse']:.3f}" and first.endswith("  quick")
    assert second.endswith("  fit.recent_share=0.1") and path == str(tmp_path / "figure.png")
