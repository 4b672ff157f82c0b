"""Analyses against values known by hand: a linear-quadratic world, a critic that is right, a model that is known."""

import json
from dataclasses import replace
from pathlib import Path

import equinox as eqx
import gymnasium as gym
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import doublehorizon as dh
from doublehorizon import replay as replays
from doublehorizon.agent import initial_state
from doublehorizon.analysis import critics, gradients, models, targets
from doublehorizon.analysis.subject import Subject, opened, subjects
from doublehorizon.cli import _status
from doublehorizon.config import CriticConfig, Horizons
from doublehorizon.envs.make import Simulator, describe, factory, make
from doublehorizon.networks import Critic, ensemble
from doublehorizon.policy import NumpyPolicy
from doublehorizon.presets import RELATIVES
from doublehorizon.records import changed
from doublehorizon.seats import Appraisal, Recipe, Seat
from doublehorizon.types import Task, Transition
from doublehorizon.updates import Policy, Setting
from doublehorizon.values import Bounds
from doublehorizon.workers import Crew
from worlds import TINY, ConstantActor, line_world

GAMMA = TINY.policy.discount
WIDE_BOUNDS = Bounds(jnp.array(-1e6), jnp.array(1e6), jnp.array(True))
QUADRATIC = Task(1, 1, None, reward=lambda obs, act, next_obs: -(next_obs[..., 0] ** 2))


def without_entropy(actor, critics_, bounds=WIDE_BOUNDS) -> Policy:
    return Policy(actor, critics_, critics_, jnp.array(-jnp.inf), bounds)


def blank_critics(members: int = 3):
    """They say 0, the middle of the bounds, whatever the state."""
    return ensemble(lambda key: Critic(CriticConfig(width=4), 1, 1, key), members, jr.key(0))


def lq_subject(states: np.ndarray, speed: float, log_noise: float = -100.0) -> Subject:
    """next = obs + act (+ noise), reward = -next^2, and a policy whose one parameter is its speed."""
    rows = Transition(*(jnp.asarray(x, jnp.float32) for x in (states, states, states[:, 0], states, 0 * states[:, 0])))
    replay = eqx.tree_at(lambda r: r.rows, replays.empty(len(states), 1, 1, 2, 5), rows)
    state = initial_state(TINY, QUADRATIC, jnp.array(0))
    state = eqx.tree_at(
        lambda s: (s.world, s.policy),
        state,
        (line_world(log_noise=log_noise), without_entropy(ConstantActor(jnp.array(speed)), blank_critics())),
    )
    return Subject(TINY, QUADRATIC, 0, len(states), state, replay)


def slope_of_the_value(start: np.ndarray, speed: float, horizon: int) -> np.ndarray:
    """d/dv of -sum gamma^i (s + (i + 1) v)^2, where v = tanh(u) is what the parameter is."""
    steps = np.arange(1, horizon + 1)
    return -np.sum(GAMMA ** (steps - 1) * 2 * (start[:, None] + steps * speed) * steps, axis=1)


def test_gradients_in_a_linear_quadratic_world_are_those_of_a_direct_computation():
    states = np.random.default_rng(0).normal(size=(128, 1)).astype(np.float32)  # all of them are taken
    found = gradients.measure(lq_subject(states, 0.25), (1, 3, 5), num_states=128, num_rollouts=4)
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


def test_the_noise_of_a_single_rollout_is_seen_through_the_mean_of_many():
    # one step: the slope is -2 (s + v + noise), so a single rollout's variance is 4 sigma^2
    states = np.zeros((32, 1), np.float32)
    found = gradients.measure(lq_subject(states, 0.25, log_noise=np.log(0.5)), (1, 2), num_states=640, num_rollouts=8)
    assert found.noise[0] == pytest.approx(4 * 0.5**2 / 2**2 / TINY.policy.batch_size, rel=0.15)
    assert found.num_states == 640 and found.num_rollouts == 8


def test_members_that_disagree_make_single_rollouts_noisy():
    # members drift by +-0.5: one step's slope is -2 (s + v +- 0.5), whose variance is 1; means of many rows hide it
    states = np.zeros((128, 1), np.float32)
    subject = lq_subject(states, 0.25)
    world = line_world(drift=(0.5, -0.5))
    found = gradients.measure(
        replace(subject, state=eqx.tree_at(lambda s: s.world, subject.state, world)), (1, 2), 512, 8
    )
    assert found.noise[0] == pytest.approx(1.0 / 2**2 / TINY.policy.batch_size, rel=0.2)


def test_advice_names_what_cannot_be_told_apart():
    def tradeoff(error, spread):
        zeros = np.zeros(3)
        return gradients.Tradeoff((1, 3, 5), 64, 8, 256, zeros, zeros, zeros, zeros, np.array(error), np.array(spread))

    clear = tradeoff([3.0, 1.0, 2.0], [0.1, 0.0, 0.1])
    assert clear.best == 3 and clear.candidates == [3]
    vague = tradeoff([3.0, 1.0, 1.1], [0.1, 0.0, 0.1])
    assert vague.best == 3 and vague.candidates == [3, 5]
    assert gradients.advise([clear], 5).horizon == 3 and "Take 3 steps (now 5)" in gradients.advise([clear], 5).reason
    for current, words in (
        (5, "5 is among them: keep it"),
        (1, "1 is worse: take 3"),
        (4, "4 was not compared: take 3"),
    ):
        told = gradients.advise([vague, vague], current).reason
        assert "cannot tell 3 and 5 steps apart" in told and words in told
    other = tradeoff([1.0, 3.0, 3.0], [0.0, 0.1, 0.1])
    assert gradients.advise([clear, other], 5).horizon == 5
    assert "do not agree (best: 3, 1)" in gradients.advise([clear, other], 5).reason


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
    setting = Setting(replace(TINY, horizons=Horizons(4, 5)), task, line_world())
    rng = np.random.default_rng(0)
    obs, act = (jnp.asarray(rng.uniform(0.5, 1, (16, 1)), jnp.float32) for _ in range(2))
    pairs = Transition(obs, act, obs[:, 0], obs, 0 * obs[:, 0])
    truth = true_value(obs[:, 0], act[:, 0], 0.25)
    right = TrueCritic(jnp.full(3, 0.25))
    policy = without_entropy(ConstantActor(speed), right)
    estimate = critics.estimate_q(setting, policy, pairs, 4, jr.key(0))
    assert float(critics.normalized_error(estimate, truth)) < 1e-4
    wrong = without_entropy(ConstantActor(speed), blank_critics())
    assert float(critics.normalized_error(critics.estimate_q(setting, wrong, pairs, 4, jr.key(0)), truth)) > 0.5


def test_the_normalised_error_is_a_median():
    truth = jnp.array([1.0, 2.0, -4.0, 1e-9, 5.0])
    assert float(critics.normalized_error(truth * 1.1, truth)) == pytest.approx(0.1, rel=1e-4)
    outlier = (truth * 1.1).at[0].set(1e9)
    assert float(critics.normalized_error(outlier, truth)) == pytest.approx(0.1, rel=1e-4)


class Track(gym.Env):
    """Moves by the action, pays the new position, ends beyond 2; may be put anywhere."""

    observation_space = gym.spaces.Box(-10, 10, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    spec = None

    def set_observation(self, obs):
        self.position = float(obs[0])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = 0.0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.position += float(action[0])
        return np.array([self.position], np.float32), self.position, self.position > 2, False, {}


def steady(speed: float) -> NumpyPolicy:
    """A linear policy that always goes at this speed, with hardly any chance."""
    weight, bias = np.zeros((1, 2), np.float32), np.array([np.arctanh(speed), -20.0], np.float32)
    one = np.ones(1, np.float32)
    return NumpyPolicy((weight,), (bias,), 0 * one, one, -one, one)


def test_real_returns_by_hand():
    config = changed(TINY, {"loop.time_limit": 3})
    env = factory(Track, config.loop)
    spec = describe(env(), config)
    seat = Seat(Simulator(env(), spec), 0)
    how = Appraisal(episodes=2, horizon=4, discount=0.5, temperature=0.0)
    obs, act = np.array([[0.0], [1.9]], np.float32), np.array([[0.25], [0.5]], np.float32)
    found = seat.appraise(0, steady(0.5), list(zip(obs, act, strict=True)), how)
    # 0.25, 0.75, 1.25, 1.75: the time limit of 3 does not cut it off; the other one ends at once
    hand = 0.25 + 0.5 * 0.75 + 0.25 * 1.25 + 0.125 * 1.75
    np.testing.assert_allclose(found, [[hand, hand], [2.4, 2.4]], rtol=1e-3)
    soft = seat.appraise(0, steady(0.5), [(obs[0], act[0])], replace(how, temperature=1.0))
    assert soft[0, 0] < hand - 5  # a policy without entropy pays for it
    pairs = Transition(*(jnp.asarray(x) for x in (obs, act, obs[:, 0], obs, obs[:, 0])))
    with Crew(Recipe(env, spec), [0, 1]) as crew:
        np.testing.assert_allclose(critics.true_values(crew, steady(0.5), pairs, how), [hand, 2.4], rtol=1e-3)


class Windy(Track):
    """Pays by chance."""

    def step(self, action):
        return np.zeros(1, np.float32), float(self.np_random.normal()), False, False, {}


@pytest.mark.parametrize("repeat", [1, 2])
def test_real_returns_have_the_environment_s_own_chance_and_go_on_beyond_its_time_limit(repeat):
    config = changed(TINY, {"loop.time_limit": 3, "loop.action_repeat": repeat})
    pair = [(np.zeros(1, np.float32), np.zeros(1, np.float32))]
    env = factory(Windy, config.loop)
    seat = Seat(Simulator(env(), describe(env(), config)), 0)
    found = seat.appraise(0, steady(0.5), pair * 2, Appraisal(3, 4, 0.5, 0.0))
    assert len(set(found.ravel().tolist())) == 6
    limited = factory(lambda: gym.wrappers.TimeLimit(Track(), 3), config.loop)
    seat = Seat(Simulator(limited(), describe(limited(), config)), 0)
    start = [(np.full(1, 1.0, np.float32), np.zeros(1, np.float32))]
    still = seat.appraise(0, steady(1e-6), start, Appraisal(1, 10, 1.0, 0.0))
    np.testing.assert_allclose(still, 10.0 * repeat, rtol=1e-3)


def test_a_sampled_action_has_the_density_that_is_told():
    rng = np.random.default_rng(0)
    weight, bias = np.zeros((1, 2), np.float32), np.array([0.3, 0.2], np.float32)
    policy = NumpyPolicy((weight,), (bias,), *(np.full(1, value) for value in (0.0, 1.0, -1.0, 1.0)))
    act, log_prob = policy.sample(np.zeros((200_000, 1)), rng)
    density, edges = np.histogram(act[:, 0], bins=20, range=(-0.9, 0.9))
    width = edges[1] - edges[0]
    middle = np.searchsorted(edges, act[:, 0]) - 1
    for k in range(4, 16):
        told = np.exp(log_prob[middle == k]).mean()
        assert density[k] / len(act) / width == pytest.approx(told, rel=0.05)


@pytest.mark.parametrize("name", ["Pendulum-v1", "paper/Hopper", "paper/Ant", "InvertedPendulum-v5"])
def test_environments_are_put_where_an_observation_was_made(name):
    env, twin = (Simulator(e, describe(e)) for e in (make(name), make(name)))
    rng = np.random.default_rng(0)
    obs = env.reset(3)
    for _ in range(3):
        obs, *_ = env.step(rng.uniform(-1, 1, env.spec.act_size))
    twin.put(obs, seed=4)
    act = rng.uniform(-1, 1, env.spec.act_size)
    (next_obs, reward, *_), (same_obs, same_reward, *_) = env.step(act), twin.step(act)
    np.testing.assert_allclose(next_obs, same_obs, atol=5e-3)
    assert reward == pytest.approx(same_reward, abs=2e-2)


def test_an_environment_that_cannot_be_put_says_so():
    env = make("InvertedDoublePendulum-v5")
    simulator = Simulator(env, describe(env))
    with pytest.raises(dh.UserError, match="set_observation"):
        simulator.put(simulator.reset(0), seed=0)


def line_rows(count: int, seed: int = 0) -> Transition:
    """A walk along the line world, in two episodes."""
    rng = np.random.default_rng(seed)
    act = rng.uniform(-0.5, 0.5, (count, 1)).astype(np.float32)
    obs, next_obs = np.zeros((count, 1), np.float32), np.zeros((count, 1), np.float32)
    for t in range(count):
        obs[t] = 5.0 if t in (0, count // 2) else next_obs[t - 1]
        next_obs[t] = obs[t] + act[t]
    return Transition(*(jnp.asarray(x) for x in (obs, act, next_obs[:, 0], next_obs, np.zeros(count, np.float32))))


def test_a_model_that_is_right_has_no_error_and_one_that_drifts_has_that_of_its_drift():
    rows = line_rows(50)
    right = models.accuracy(line_world(), rows)
    assert right.rows == 50 and right.total < 1e-5
    drifting = models.accuracy(line_world(drift=(0.3, 0.1)), rows)
    np.testing.assert_allclose(drifting.rmse, [0.2, 0.2], rtol=1e-4)  # the mean of both members
    scale = np.array([np.std(rows.next_obs), np.std(rows.act)])
    np.testing.assert_allclose(drifting.relative, 0.2 / scale, rtol=1e-3)
    # its members differ by 0.2, a deviation of 0.1 sqrt 2: 0.2 is within 1.96 of them, not within 0.67
    still = models.accuracy(line_world(), replace_rewards(rows, 1.0))
    assert still.relative[0] == 0.0 and still.rmse[0] > 0  # it never changes
    assert drifting.coverage == {0.5: 0.0, 0.8: 0.0, 0.95: 1.0}


def replace_rewards(rows: Transition, value: float) -> Transition:
    return eqx.tree_at(lambda r: r.reward, rows, jnp.full_like(rows.reward, value))


def line_subject(rows: Transition, drift) -> Subject:
    replay = eqx.tree_at(lambda r: r.rows, replays.empty(len(rows.reward), 1, 1, 2, 5), rows)
    state = eqx.tree_at(lambda s: s.world, initial_state(TINY, Task(1, 1, None), jnp.array(0)), line_world(drift=drift))
    return Subject(TINY, Task(1, 1, None), 0, len(rows.reward), state, replay)


def test_open_loop_errors_add_up_along_real_trajectories():
    rows = line_rows(40)
    starts = models.trajectories(rows, 40, horizon=5, most=100, seed=0)
    assert len(starts) == 2 * (20 - 4) and 17 not in starts and 16 - 1 in starts  # none across the new episode
    found = models.open_loop(line_subject(rows, (0.1, 0.1)), starts, 5, 4, jr.key(0))
    np.testing.assert_allclose(found.error, 0.1 * np.arange(1, 6), rtol=1e-3)
    np.testing.assert_allclose(found.spread, 0.0, atol=1e-5)
    assert found.standing_still[0] == pytest.approx(np.sqrt(np.mean(np.square(rows.act[starts]))), rel=1e-4)
    with pytest.raises(dh.UserError, match="no stretch of 30 steps"):
        models.trajectories(rows, 40, horizon=30, most=100, seed=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny run of the algorithm or of one of its relatives, by name."""
    folder = tmp_path_factory.mktemp("analyses")

    def run(name: str) -> Path:
        if not (folder / name).exists():
            config = changed(
                TINY, {**RELATIVES.get(name, {}), "loop.steps_per_iteration": 20, "loop.checkpoint_every": 1}
            )
            dh.DHMBPO("Pendulum-v1", seeds=2, config=config).learn(80, out=folder / name)
        return folder / name

    return run


@pytest.mark.parametrize("name", ["dhmbpo", "sac", *(pytest.param(x, marks=pytest.mark.slow) for x in ("svg", "mbpo"))])
def test_lessons_of_every_relative(trained, name):
    with opened(trained(name), "cpu") as model:
        (subject,) = subjects(model, (1,))
        found = targets.lesson(subject, 80, 3, jr.key(0))
    horizon = max(1, subject.config.horizons.training)
    assert found.targets.shape == (3 * 8,) and found.soft_rewards.shape == (3 * 8 * horizon,)
    assert found.rewards.shape == (80,) and found.rewards.min() >= -16.3 and found.low <= found.high
    assert 0 <= found.outside <= 1


def test_a_run_s_own_critics_learn_again(trained):
    with opened(trained("dhmbpo"), "cpu") as model:
        (subject,) = subjects(model, (0,))
        pairs = subject.drawn(8, jr.key(0))
        truth = np.linspace(-900.0, -100.0, 8)
        trials = [critics.Trial(distribution, updates=16, every=8, repeats=2, rollouts=2) for distribution in (4, 0)]
        curves = [critics.learn_again(subject, pairs, truth, trial) for trial in trials]
    for curve in curves:
        assert curve.updates == (0, 8, 16) and curve.errors.shape == (2, 3) and np.isfinite(curve.errors).all()
        mean, half = curve.mean_and_interval()
        assert mean.shape == half.shape == (3,) and (half > 0).all()
    assert np.any(curves[0].errors != curves[1].errors)


def test_a_model_is_measured_on_what_it_saw_and_fitted_again_to_less(trained):
    with opened(trained("dhmbpo"), "cpu") as model:
        (subject,) = subjects(model, (0,))
        parts = models.split(subject, 80, 1000)
        assert {name: len(rows.reward) for name, rows in parts.items()} == {"training": 64, "held out": 16}
        world = models.refitted(subject, 40)
        assert np.isfinite(models.accuracy(world, parts["training"]).total)
        assert len(models.later(subject, 60, 1000).reward) == 20 and models.later(subject, 80, 1000) is None
        with pytest.raises(dh.UserError, match="but the run has 80"):
            models.refitted(subject, 100)


def test_a_run_without_policies_cannot_be_analysed(tmp_path):
    dh.DHMBPO("Pendulum-v1", config=TINY).learn(20, out=tmp_path / "run")
    with pytest.raises(dh.UserError, match="has not learnt a policy yet"), opened(tmp_path / "run", "cpu"):
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
        arguments = (words + option).replace("RUN", str(run)).split()
        assert _status([*arguments, "--seeds", "0"]) == 0
        out = capsys.readouterr().out
        found = json.loads(out) if option else out
        path = found["figure"] if option else out.split()[-1]
        assert path == str(run / f"{figure}.png") and Path(path).stat().st_size > 10_000
    assert list(found["seeds"]) == ["0"]


@pytest.mark.slow
def test_critics_are_not_compared_without_training_rollouts(trained, capsys):
    assert _status(["analyze", "critic-error", str(trained("mbpo"))]) == 2
    assert "no training rollouts" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["analyze model", "analyze critic-error", "advise-horizon"])
def test_what_needs_a_model_says_so(trained, what, capsys):
    assert _status([*what.split(), str(trained("sac"))]) == 2
    assert "without one (preset sac)" in capsys.readouterr().err


def test_typos_in_analyses_get_the_nearest_name(capsys):
    assert _status(["analyze", "critic-eror", "run"]) == 2
    assert "Did you mean 'critic-error'?" in capsys.readouterr().err
    assert _status(["analyze", "--help"]) == 0 and "targets" in capsys.readouterr().out


def test_horizons_for_real_returns():
    assert critics.horizon_for(0.995) == 919 and critics.horizon_for(0.5) == 7
