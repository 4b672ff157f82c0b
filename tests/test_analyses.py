"""Analyses against values known by hand: a linear-quadratic world, a critic that is right, a model that is known."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import doublehorizon as dh
from doublehorizon.algorithm import replay_buffer as replays
from doublehorizon.algorithm.actor_critic import ActorCritic
from doublehorizon.algorithm.agent import initial_state
from doublehorizon.algorithm.ensemble import ensemble
from doublehorizon.algorithm.model_buffer import States, push
from doublehorizon.algorithm.networks import Critic
from doublehorizon.algorithm.types import Rollout, Task, Transition
from doublehorizon.algorithm.updates import UpdateContext
from doublehorizon.algorithm.values import Bounds, rewards_of_bounds
from doublehorizon.analysis import critic_error, critic_targets, gradients, horizon_advice, model_error
from doublehorizon.analysis.loaded_seed import LoadedSeed, loaded_seeds, open_run
from doublehorizon.cli import _status
from doublehorizon.config import CriticConfig, Horizons
from doublehorizon.config_json import changed
from doublehorizon.errors import UserError
from doublehorizon.presets import RELATIVES
from worlds import TINY, ConstantActor, line_world

GAMMA = TINY.policy.discount
WIDE_BOUNDS = Bounds(jnp.array(-1e6), jnp.array(1e6), jnp.array(True))
QUADRATIC = Task(1, 1, None, reward=lambda obs, act, next_obs: -(next_obs[..., 0] ** 2))


def without_entropy(actor, critics_, bounds=WIDE_BOUNDS) -> ActorCritic:
    return ActorCritic(actor, critics_, critics_, jnp.array(-jnp.inf), bounds)


def blank_critics(members: int = 3):
    """They say 0, the middle of the bounds, whatever the state."""
    return ensemble(lambda key: Critic(CriticConfig(width=4), 1, 1, key), members, jr.key(0))


def lq_seed(states: np.ndarray, speed: float, log_noise: float = -100.0) -> LoadedSeed:
    """next = obs + act (+ noise), reward = -next^2, and a policy whose one parameter is its speed."""
    rows = Transition(*(jnp.asarray(x, jnp.float32) for x in (states, states, states[:, 0], states, 0 * states[:, 0])))
    replay = eqx.tree_at(lambda r: r.rows, replays.empty(len(states), 1, 1, 2, 5), rows)
    state = initial_state(TINY, QUADRATIC, jnp.array(0))
    state = eqx.tree_at(
        lambda s: (s.world, s.actor_critic),
        state,
        (line_world(log_noise=log_noise), without_entropy(ConstantActor(jnp.array(speed)), blank_critics())),
    )
    return LoadedSeed(TINY, QUADRATIC, 0, len(states), state, replay, 1.0)


def slope_of_the_value(start: np.ndarray, speed: float, horizon: int) -> np.ndarray:
    """d/dv of -sum gamma^i (s + (i + 1) v)^2, where v = tanh(u) is what the parameter is."""
    steps = np.arange(1, horizon + 1)
    return -np.sum(GAMMA ** (steps - 1) * 2 * (start[:, None] + steps * speed) * steps, axis=1)


def test_gradients_in_a_linear_quadratic_world_are_those_of_a_direct_computation():
    states = np.random.default_rng(0).normal(size=(128, 1)).astype(np.float32)  # all of them are taken
    found = gradients.measure(lq_seed(states, 0.25), (1, 3, 5), num_states=128, num_rollouts=4)
    direct = np.stack([slope_of_the_value(states[:, 0], 0.25, t) for t in (1, 3, 5)])
    mean, size = direct.mean(1), 2  # the hand-made actor has two parameters, one of which does nothing
    bias = np.mean((direct - mean[-1]) ** 2, axis=1) / size**2
    sem = np.sqrt(np.sum((direct - mean[:, None]) ** 2, axis=1) / (128 * 127)) / size
    np.testing.assert_allclose(found.bias, bias, rtol=2e-3)
    np.testing.assert_allclose(found.standard_error, sem, rtol=2e-3)
    apart = direct - direct[-1:]
    chance = np.var(apart, axis=1, ddof=1) / 128
    np.testing.assert_allclose(found.distance, ((mean - mean[-1]) ** 2 - chance) / size**2, rtol=2e-3, atol=1e-6)
    assert np.all(np.diff(found.standard_error) > 0)  # longer rollouts add up more of what differs
    # without chance in a rollout, all of a batch's noise is between states
    np.testing.assert_allclose(
        found.noise, np.var(direct, axis=1, ddof=1) / size**2 / TINY.policy.batch_size, rtol=2e-3
    )


def test_gradients_are_measured_where_training_begins_or_in_the_replay():
    loaded = lq_seed(np.zeros((128, 1), np.float32), 0.25)
    half = States(jnp.ones((TINY.policy.ring_capacity // 2, 1)))  # the other half is still empty
    buffer = push(loaded.state.model_buffer, half)
    filled = replace(loaded, state=eqx.tree_at(lambda s: s.model_buffer, loaded.state, buffer))
    assert np.all(filled.starts(512, jr.key(0)) == 1.0) and np.all(loaded.starts(512, jr.key(0)) == 0.0)
    mixed = replace(filled, config=changed(TINY, {"policy.replay_start_share": 0.25}))
    starts = np.asarray(mixed.starts(512, jr.key(0)))
    assert np.sum(starts == 0.0) == 128 and np.sum(starts == 1.0) == 384 and 16 < np.sum(starts[:256] == 0.0) < 112
    for from_replay, at in ((False, 1.0), (True, 0.0)):
        found = gradients.measure(filled, (1, 2), 128, 4, from_replay=from_replay)
        slopes = np.array([slope_of_the_value(np.array([at]), 0.25, t)[0] for t in (1, 2)]) / 2
        np.testing.assert_allclose(found.distance[0], (slopes[0] - slopes[1]) ** 2, rtol=1e-3)
        np.testing.assert_allclose(
            found.error, found.distance + found.noise / 19, atol=1e-6
        )  # Adam's mean of gradients


def test_the_noise_of_a_single_rollout_is_seen_through_the_mean_of_many():
    # one step: the slope is -2 (s + v + noise), so a single rollout's variance is 4 sigma^2
    states = np.zeros((128, 1), np.float32)
    found = gradients.measure(lq_seed(states, 0.25, log_noise=np.log(0.5)), (1, 2), num_states=512, num_rollouts=8)
    assert found.noise[0] == pytest.approx(4 * 0.5**2 / 2**2 / TINY.policy.batch_size, rel=0.15)
    assert found.num_states == 512 and found.num_rollouts == 8


def test_members_that_disagree_make_single_rollouts_noisy():
    # members drift by +-0.5: one step's slope is -2 (s + v +- 0.5), whose variance is 1; means of many rows hide it
    states = np.zeros((128, 1), np.float32)
    loaded = lq_seed(states, 0.25)
    world = line_world(drift=(0.5, -0.5))
    found = gradients.measure(
        replace(loaded, state=eqx.tree_at(lambda s: s.world, loaded.state, world)), (1, 2), 512, 8
    )
    assert found.noise[0] == pytest.approx(1.0 / 2**2 / TINY.policy.batch_size, rel=0.2)


def tradeoff(error, wobble=0.01, bias=0.0) -> gradients.Tradeoff:
    """For 1, 3 and 5 steps; leaving out a group moves the logarithms of the errors of 1 and 5 steps up or down."""
    error, zeros = np.array(error, float), np.zeros(3)
    without = error * np.exp(wobble * np.array([[1.0, 0.0, 1.0], [-1.0, 0.0, -1.0]] * 8))
    found = gradients.Tradeoff((1, 3, 5), 64, 8, zeros, bias + zeros, zeros, 19 * (error - bias), without)
    np.testing.assert_allclose(found.error, error)
    return found


def test_advice_names_what_cannot_be_told_apart():
    clear, vague = tradeoff([3.0, 1.0, 2.0]), tradeoff([3.0, 1.0, 1.05])
    # 16 groups, logarithms 0.01 off to each side: a standard error of sqrt(15) * 0.01, two of which are 0.077
    verdict = horizon_advice.judge([vague])
    np.testing.assert_allclose(verdict.ratio, [3.0, 1.0, 1.05])
    np.testing.assert_allclose(np.log(verdict.factor), 2 * np.sqrt(15) * 0.01 * np.array([1, 0, 1]))
    assert verdict.best == 3 and verdict.candidates == [3, 5] and horizon_advice.judge([clear]).candidates == [3]
    assert horizon_advice.advise([clear], 5).horizon == 3
    assert (
        "Take 3 steps (now 5): the squared error of a training step is least with them, 3.00 times as large with 1 "
        in (horizon_advice.advise([clear], 5).reason)
    )
    assert "Keep 3 steps: " in horizon_advice.advise([clear], 3).reason
    for current, words in (
        (5, "5 is among them: keep it. More seeds, or --states,"),
        (1, "1 is worse: take 3"),
        (4, "4 was not compared: take 3"),
    ):
        told = horizon_advice.advise([vague, vague], current).reason
        assert "cannot tell 3 and 5 steps apart" in told and words in told


def test_advice_says_what_makes_other_horizons_worse():
    both = tradeoff([3.0, 1.0, 3.0])
    biased = replace(both, distance=np.array([2.5, 0.5, 0.0]), noise=19 * np.array([0.5, 0.5, 3.0]))
    told = horizon_advice.advise([biased], 5).reason
    assert "3.00 times as large with 1 (by bias) and 3.00 times as large with 5 (by noise)." in told
    assert "with 1 (by bias)" in horizon_advice.advise([biased, biased, both], 5).reason  # what most seeds say
    assert "More may be better still." in horizon_advice.advise([tradeoff([3.0, 2.0, 1.0], wobble=0.0)], 5).reason


def test_seeds_are_judged_by_ratios_not_by_the_largest_of_them():
    # a seed a million times noisier says the same as the others; one that says the opposite makes all unsure
    alike = [tradeoff(scale * np.array([2.0 + k / 10, 1.0, 4.0])) for k, scale in enumerate((1.0, 1e6, 1e-3))]
    verdict = horizon_advice.judge(alike)
    np.testing.assert_allclose(verdict.ratio, [(2.0 * 2.1 * 2.2) ** (1 / 3), 1.0, 4.0])
    logs = np.log([2.0, 2.1, 2.2])
    np.testing.assert_allclose(np.log(verdict.factor[0]), 4.302653 * logs.std(ddof=1) / np.sqrt(3), rtol=1e-5)
    assert verdict.candidates == [3]
    unlike = horizon_advice.advise([*alike, tradeoff([1.0, 1e3, 1.0])], 5)
    assert unlike.horizon == 5 and "cannot tell 1, 3 and 5 steps apart" in unlike.reason
    assert "More seeds would tell more" in unlike.reason
    # two that contradict each other: what both say is within the interval
    two = horizon_advice.judge([tradeoff([10.0, 1.0, 10.0]), tradeoff([1.0, 5.0, 1.0])])
    assert two.best == 3 and two.candidates == [1, 3, 5]
    np.testing.assert_allclose(two.low[0], 1 / 5)


def test_rollouts_that_leave_all_bounds_are_told():
    loaded = lq_seed(np.full((128, 1), 3e38, np.float32), 0.25)
    with pytest.raises(UserError, match="at the horizon 1 are not finite"):
        gradients.measure(loaded, (1, 2), 128, 4)
    with pytest.raises(UserError, match="at least two are needed"):
        gradients.measure(loaded, ())


def test_how_the_standard_error_grows_with_each_step():
    def grown(*factors):
        return [replace(tradeoff([1.0, 1.0, 1.0]), standard_error=7.0 * f ** np.array([1, 3, 5])) for f in factors]

    assert horizon_advice.growth(grown(1.5)).value == pytest.approx(1.5)
    found = horizon_advice.growth(grown(1.2, 1.2, 1.5))
    logs = np.log([1.2, 1.2, 1.5])
    half = 4.302653 * logs.std(ddof=1) / np.sqrt(3)
    assert (found.value, found.low, found.high) == pytest.approx(
        tuple(np.exp(logs.mean() + side) for side in (0.0, -half, half)), rel=1e-5
    )


class TrueCritic(Critic):
    """In a world that moves by the action and pays the new position, under a constant speed: the value itself."""

    speed: jnp.ndarray

    def __init__(self, speed):
        self.mlp, self.speed = None, speed  # type: ignore[assignment]

    def __call__(self, inputs, seeds=None):
        return true_value(inputs[:, 0], inputs[:, 1], self.speed) / 1e6  # of the bounds' half width


def true_value(position, act, speed):
    """(s + a) / (1 - gamma) + v gamma / (1 - gamma)^2."""
    return (position + act) / (1 - GAMMA) + speed * GAMMA / (1 - GAMMA) ** 2


def test_the_error_of_a_critic_that_is_the_true_value_is_zero():
    task, speed = Task(1, 1, None), jnp.array(0.25)
    context = UpdateContext(replace(TINY, horizons=Horizons(4, 5)), task, line_world())
    rng = np.random.default_rng(0)
    obs, act = (jnp.asarray(rng.uniform(0.5, 1, (16, 1)), jnp.float32) for _ in range(2))
    pairs = Transition(obs, act, obs[:, 0], obs, 0 * obs[:, 0])
    truth = true_value(obs[:, 0], act[:, 0], 0.25)
    right = TrueCritic(jnp.full(3, 0.25))
    policy = without_entropy(ConstantActor(speed), right)
    estimate = critic_error.estimate_q(context, policy, pairs, 4, jr.key(0))
    assert float(critic_error.normalized_error(estimate, truth)) < 1e-4
    wrong = without_entropy(ConstantActor(speed), blank_critics())
    assert (
        float(critic_error.normalized_error(critic_error.estimate_q(context, wrong, pairs, 4, jr.key(0)), truth)) > 0.5
    )


def test_the_normalised_error_is_a_median():
    truth = jnp.array([1.0, 2.0, -4.0, 1e-9, 5.0])
    assert float(critic_error.normalized_error(truth * 1.1, truth)) == pytest.approx(0.1, rel=1e-4)
    outlier = (truth * 1.1).at[0].set(1e9)
    assert float(critic_error.normalized_error(outlier, truth)) == pytest.approx(0.1, rel=1e-4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, run):
    """A tiny run of the algorithm or of one of its relatives, by name."""
    folder = tmp_path_factory.mktemp("analyses")
    shutil.copytree(run, folder / "dhmbpo")

    def named(name: str) -> Path:
        if not (folder / name).exists():
            config = changed(TINY, {**RELATIVES.get(name, {}), "loop.steps_per_iteration": 20})
            dh.DHMBPO("Pendulum-v1", seeds=2, config=config).learn(80, out=folder / name)
        return folder / name

    return named


@pytest.mark.parametrize(
    "name", ["dhmbpo", "sac", *(pytest.param(x, marks=pytest.mark.slow) for x in ("no-dr", "no-tr"))]
)
def test_critic_targets_of_every_relative(trained, name):
    with open_run(trained(name), "cpu") as model:
        (loaded,) = loaded_seeds(model, (1,))
        found = critic_targets.target_stats(loaded, loaded.num_rows, 3, jr.key(0))
    horizon = max(1, loaded.config.horizons.training)
    assert found.targets.shape == (3 * 8,) and found.soft_rewards.shape == (3 * 8 * horizon,)
    assert found.rewards.shape == (loaded.num_rows,) and found.rewards.min() >= -16.3 and found.low <= found.high
    assert 0 <= found.outside <= 1


def test_the_rewards_of_a_figure_are_those_that_set_the_bounds():
    """By `endings`, what a step brings if the episode continues, and only of steps after which it does."""
    config, one = CriticConfig(bounds="endings"), jnp.ones((4, 1, 1))
    log_prob, alive = jnp.zeros((4, 1)), jnp.array([[1.0], [1.0], [1.0], [0.0]])
    reward, going = jnp.array([[1.0], [2.0], [-200.0]]), jnp.array([[1.0], [2.0], [3.0]])
    rollout = Rollout(one, one, log_prob, reward, going, alive)
    soft, counted = rewards_of_bounds(config, rollout, jnp.array(0.1))
    np.testing.assert_array_equal(soft[counted > 0.5], [1.0, 2.0])
    soft, counted = rewards_of_bounds(replace(config, bounds="alive_and_zero"), rollout, jnp.array(0.1))
    np.testing.assert_array_equal(soft[counted > 0.5], [1.0, 2.0, -200.0])


@pytest.mark.slow
def test_a_run_s_own_critics_learn_again(trained):
    with open_run(trained("dhmbpo"), "cpu") as model:
        (loaded,) = loaded_seeds(model, (0,))
        pairs = loaded.drawn(8, jr.key(0))
        truth = np.linspace(-900.0, -100.0, 8)
        trials = [
            critic_error.Trial(distribution, updates=16, every=8, repeats=2, rollouts=2) for distribution in (4, 0)
        ]
        curves = [critic_error.learn_again(loaded, pairs, truth, trial) for trial in trials]
    for curve in curves:
        assert curve.updates == (0, 8, 16) and curve.errors.shape == (2, 3) and np.isfinite(curve.errors).all()
        mean, half = curve.mean_and_interval()
        assert mean.shape == half.shape == (3,) and (half > 0).all()
    assert np.any(curves[0].errors != curves[1].errors)


def test_a_model_is_measured_on_what_it_saw_and_fitted_again_to_less(trained):
    with open_run(trained("dhmbpo"), "cpu") as model:
        (loaded,) = loaded_seeds(model, (0,))
        holding_out = replace(loaded, config=changed(loaded.config, {"fit.batches_per_step": None}))
        assert set(model_error.split(loaded, 100, 1000)) == {"training"}
        parts = model_error.split(holding_out, 100, 1000)
        assert {name: len(rows.reward) for name, rows in parts.items()} == {"training": 80, "held out": 20}
        world = model_error.refitted(loaded, 40)
        assert np.isfinite(model_error.accuracy(loaded.config, world, parts["training"]).total)
        assert len(model_error.later(loaded, 80, 1000).reward) == 20 and model_error.later(loaded, 100, 1000) is None
        with pytest.raises(dh.UserError, match="but the run has 100"):
            model_error.refitted(loaded, 120)


def test_a_run_without_policies_cannot_be_analysed(tmp_path, only_collecting):
    dh.DHMBPO("Pendulum-v1", config=TINY).learn(20, out=tmp_path / "run")
    with pytest.raises(dh.UserError, match="has not learnt a policy yet"), open_run(tmp_path / "run", "cpu"):
        pass


@pytest.mark.parametrize(
    ("words", "figure"),
    [
        pytest.param(
            "analyze critic-error RUN --pairs 4 --episodes 1 --horizon 5 --updates 8 --every 4",
            "critic-error",
            marks=pytest.mark.slow,
        ),
        ("analyze model RUN --horizon 4 --trajectories 4 --particles 2", "model-error"),
        ("analyze targets RUN --batches 2", "targets"),
        ("advise-horizon RUN --horizons 1 2 --states 32 --rollouts 4", "horizons"),
    ],
)
def test_analyses_as_commands(trained, words, figure, capsys):
    run = trained("dhmbpo")
    for option in ("", " --json"):
        arguments = [str(run) if word == "RUN" else word for word in (words + option).split()]
        assert _status([*arguments, "--seeds", "0"]) == 0
        out = capsys.readouterr().out
        found = json.loads(out) if option else out
        path = found["figure"] if option else out.splitlines()[-1]
        assert path == str(run / f"{figure}.png") and Path(path).stat().st_size > 10_000
    assert list(found["seeds"]) == ["0"]


@pytest.mark.slow
def test_critics_are_not_compared_without_training_rollouts(trained, capsys):
    assert _status(["analyze", "critic-error", str(trained("no-tr"))]) == 2
    assert "no training rollouts" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["analyze model", "analyze critic-error", "advise-horizon"])
def test_what_needs_a_model_says_so(trained, what, capsys):
    assert _status([*what.split(), str(trained("sac"))]) == 2
    assert "without one (preset sac)" in capsys.readouterr().err


def test_typos_in_analyses_get_the_nearest_name(capsys):
    assert _status(["analyze", "critic-eror", "run"]) == 2
    assert "Did you mean 'critic-error'?" in capsys.readouterr().err
    assert _status(["analyze", "--help"]) == 0 and "targets" in capsys.readouterr().out
