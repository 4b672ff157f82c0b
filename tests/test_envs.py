import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from doublehorizon.config import LoopConfig
from doublehorizon.envs import paper
from doublehorizon.envs.make import Simulator, describe, make
from doublehorizon.envs.termination import never
from doublehorizon.errors import UserError
from doublehorizon.workers import Seat

# Mean and standard deviation over 8 seeds of the published evaluations at step 0 (random actions, 10 episodes each),
# from the CSV files that the authors of the paper publish with their code.
PUBLISHED = {
    "HalfCheetah": (17, 6, -279.0, 38.0),
    "Hopper": (11, 3, 17.0, 4.0),
    "Walker2d": (17, 6, 2.0, 2.0),
    "Ant": (27, 8, -42.0, 28.0),
    "Humanoid": (45, 17, 119.0, 14.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_random_returns_on_the_papers_tasks_are_the_published_ones(name):
    obs_size, act_size, mean, spread = PUBLISHED[name]
    env = make(f"paper/{name}")
    spec = describe(env)
    assert (spec.obs_size, spec.act_size, spec.time_limit) == (obs_size, act_size, 1000)
    seat = Seat(Simulator(env, spec), seed=0)
    found = seat.evaluate(None, step=0, num_episodes=10)
    assert abs(found - mean) < 3.5 * spread


@pytest.mark.parametrize("name", [n for n in PUBLISHED if n != "HalfCheetah"])
def test_the_papers_bonus_is_not_paid_on_the_step_that_ends_an_episode(name):
    env = paper.TASKS[name]()
    env.reset(seed=0)
    rng, bonus = np.random.default_rng(0), env.healthy_bonus
    terminated = False
    while not terminated:
        act = rng.uniform(env.action_space.low, env.action_space.high).astype(np.float32)
        _, reward, terminated, _, info = env.step(act)
        rest = reward - info["x_velocity"] + env.control_cost * float(np.sum(np.square(act))) + env._extra_cost()
        assert rest == pytest.approx(0.0 if terminated else bonus, abs=1e-5)


def test_humanoid_moves_for_free_and_hopper_velocities_are_not_clipped():
    assert paper.Humanoid.control_cost == 0.0
    env = paper.Hopper()
    env.reset(seed=0)
    env.set_state(env.init_qpos, np.full(env.model.nv, 50.0))
    assert env._observe()[-1] == 50.0


@pytest.mark.parametrize(
    "env_id",
    [
        *(f"paper/{name}" for name in PUBLISHED),
        *("Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5", "InvertedPendulum-v5", "InvertedDoublePendulum-v5"),
        *("Pendulum-v1", "Reacher-v5", "Swimmer-v5"),
    ],
)
def test_known_rules_agree_with_the_environment(env_id):
    env = make(env_id)
    spec = describe(env)
    batch = Seat(Simulator(env, spec), seed=1).collect(None, 400)
    assert spec.terminates is not None
    np.testing.assert_array_equal(spec.terminates(batch["next_obs"]), batch["terminated"] > 0)
    assert spec.never_ends == (env_id in ("paper/HalfCheetah", "Pendulum-v1", "Reacher-v5", "Swimmer-v5"))


def test_options_that_may_change_the_rule_make_it_unknown():
    assert describe(gym.make("Hopper-v5", terminate_when_unhealthy=False)).terminates is None
    assert describe(gym.make("Hopper-v5", render_mode="rgb_array")).terminates is not None


class Lever(gym.Env):
    """Observes the action it was given; ends by its own rule; has an uneven action range."""

    observation_space = Box(-np.inf, np.inf, (2,))
    action_space = Box(np.array([0.0, -10.0]), np.array([1.0, 30.0]), dtype=np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2), {}

    def step(self, action):
        return np.asarray(action), 1.0, False, False, {}

    def is_terminal(self, next_obs):
        return next_obs[..., 0] > 5.0


def test_actions_are_scaled_to_uneven_bounds_and_the_limit_cuts_off():
    simulator = Simulator(Lever(), describe(Lever(), LoopConfig(time_limit=3)))
    simulator.reset(seed=0)
    np.testing.assert_allclose(simulator.step(np.array([-1.0, -1.0]))[0], [0.0, -10.0])
    np.testing.assert_allclose(simulator.step(np.array([0.0, 0.5]))[0], [0.5, 20.0])
    obs, _, terminated, truncated = simulator.step(np.array([7.0, 1.0]))  # beyond the range: clipped
    np.testing.assert_allclose(obs, [1.0, 30.0])
    assert (terminated, truncated) == (False, True)


def test_an_action_is_held_for_its_repeats_and_the_rewards_add_up():
    simulator = Simulator(Lever(), describe(Lever(), LoopConfig(time_limit=2, action_repeat=3)))
    simulator.reset(seed=0)
    assert simulator.step(np.zeros(2))[1:] == (3.0, False, False)
    assert simulator.step(np.zeros(2))[1:] == (3.0, False, True)
    assert describe(make("Pendulum-v1"), LoopConfig(action_repeat=2)).time_limit == 100
    longer = Simulator(make("Pendulum-v1", 300), describe(make("Pendulum-v1", 300)))
    longer.reset(seed=0)
    assert [longer.step(np.zeros(1))[3] for _ in range(300)].index(True) == 299


def test_an_environments_own_rule_is_used():
    rule = describe(Lever(), LoopConfig(time_limit=3)).terminates
    assert rule is not None
    assert rule(np.array([[6.0, 0.0], [4.0, 0.0]])).tolist() == [True, False]


class Shape(Lever):
    def __init__(self, observation_space=None, action_space=None):
        self.observation_space = observation_space or Lever.observation_space
        self.action_space = action_space or Lever.action_space


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (Shape(action_space=Discrete(3)), ["Discrete(3)", "continuous"]),
        (Shape(action_space=Box(-np.inf, np.inf, (2,))), ["without bounds", "RescaleAction"]),
        (Shape(observation_space=Box(0, 255, (8, 8, 3), np.uint8)), ["images", "(8, 8, 3)"]),
        (Shape(observation_space=Discrete(4)), ["Discrete(4)", "FlattenObservation"]),
        (Shape(observation_space=Box(-1, 1, (2, 3))), ["(2, 3)", "FlattenObservation"]),
        (Shape(action_space=Box(-1, 1, (2, 3))), ["(2, 3)", "vector"]),
        (Shape(), ["time limit", "--loop.time-limit"]),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_what_to_do(env, words):
    with pytest.raises(UserError) as problem:
        describe(env)
    for word in words:
        assert word in str(problem.value)
    assert "\n" not in str(problem.value)


def test_unknown_ids_are_answered_with_the_nearest():
    with pytest.raises(UserError, match="paper/HalfCheetah"):
        make("paper/Halfcheeta")
    with pytest.raises(UserError, match="Hopper-v5"):
        make("Hopper-v9")


def test_bad_numbers_from_an_environment_are_named():
    class Broken(Lever):
        def step(self, action):
            return np.array([np.nan, 0.0]), 1.0, False, False, {}

    simulator = Simulator(Broken(), describe(Broken(), LoopConfig(time_limit=3)))
    simulator.reset(seed=0)
    with pytest.raises(UserError, match="Broken returned an observation"):
        simulator.step(np.zeros(2))


def test_never_is_never():
    assert not never(np.ones((4, 2))).any()
