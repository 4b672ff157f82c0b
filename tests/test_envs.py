import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box, Discrete

from doublehorizon.acting.env_runner import EnvRunner
from doublehorizon.config import Config, LoopConfig
from doublehorizon.envs import paper
from doublehorizon.envs.gym_check import complaints
from doublehorizon.envs.make import Simulator, describe, factory, make, own_time_limit, time_limit_note
from doublehorizon.envs.termination import never
from doublehorizon.errors import UserError

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
    seat = EnvRunner(Simulator(env, spec), seed=0)
    found = seat.evaluate(0, None, num_episodes=10)
    assert abs(found - mean) < 3.5 * spread


# Where the robot is, and the sum of its joints' speeds, after 20 steps from rest with the actions of the test below, by
# MuJoCo 2.3.7 itself, the version behind the published curves: outside this project, from the same model files.
BY_OLD_MUJOCO = {
    "HalfCheetah": (-0.14441152, 16.194185),
    "Hopper": (-0.01666247, 4.396351),
    "Walker2d": (-0.03367648, 21.341804),
    "Ant": (-0.34281899, 20.692239),
    "Humanoid": (-0.05439263, 51.319039),
}


@pytest.mark.parametrize("name", BY_OLD_MUJOCO)
def test_the_papers_robots_touch_the_ground_as_they_did_in_its_curves(name):
    env = paper.TASKS[name]()
    env.reset(seed=0)
    env.set_state(env.init_qpos, env.init_qvel)
    high = env.model.actuator_ctrlrange[:, 1]
    for t in range(20):
        env.step(0.5 * high * np.sin(t + np.arange(env.model.nu)))
    found = (env.data.qpos[0], np.abs(env.data.qvel).sum())
    assert found == pytest.approx(BY_OLD_MUJOCO[name], rel=1e-5)


def test_the_cheetah_weighs_what_its_file_asks_for_and_nothing_warns(capfd):
    env = paper.TASKS["HalfCheetah"](width=1000)
    assert "settotalmass" not in "".join(capfd.readouterr())
    assert env.model.vis.global_.offwidth == 1000
    compiled = mujoco.MjModel.from_xml_path(env.fullpath)  # by the option that MuJoCo warns of
    for name in ("body_mass", "body_inertia", "dof_invweight0", "body_invweight0", "body_subtreemass", "actuator_acc0"):
        np.testing.assert_array_equal(getattr(env.model, name), getattr(compiled, name))
    assert env.model.stat.meaninertia == pytest.approx(compiled.stat.meaninertia, rel=1e-12)


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
    batch = EnvRunner(Simulator(env, spec), seed=1).collect(0, None, 400).batch
    assert spec.terminates is not None
    np.testing.assert_array_equal(spec.terminates(batch["next_obs"]), batch["terminated"] > 0)
    assert spec.termination == "known"
    assert (spec.rule is None) == (env_id in ("paper/HalfCheetah", "Pendulum-v1", "Reacher-v5", "Swimmer-v5"))


def test_options_that_may_change_the_rule_make_it_unknown():
    assert describe(gym.make("Hopper-v5", terminate_when_unhealthy=False)).terminates is None
    assert describe(gym.make("Hopper-v5", render_mode="rgb_array")).terminates is not None


def limited(**loop) -> Config:
    return Config(loop=LoopConfig(**loop))


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
    simulator = Simulator(Lever(), describe(Lever(), limited(time_limit=3)))
    simulator.reset(seed=0)
    np.testing.assert_allclose(simulator.step(np.array([-1.0, -1.0]))[0], [0.0, -10.0])
    np.testing.assert_allclose(simulator.step(np.array([0.0, 0.5]))[0], [0.5, 20.0])
    obs, _, terminated, truncated = simulator.step(np.array([7.0, 1.0]))  # beyond the range: clipped
    np.testing.assert_allclose(obs, [1.0, 30.0])
    assert (terminated, truncated) == (False, True)


def test_an_action_is_held_for_its_repeats_and_the_rewards_add_up():
    simulator = Simulator(Lever(), describe(Lever(), limited(time_limit=2, action_repeat=3)))
    simulator.reset(seed=0)
    assert simulator.step(np.zeros(2))[1:] == (3.0, False, False)
    assert simulator.step(np.zeros(2))[1:] == (3.0, False, True)
    assert describe(make("Pendulum-v1"), limited(action_repeat=2)).time_limit == 100
    env = make("Pendulum-v1", LoopConfig(time_limit=300))
    longer = Simulator(env, describe(env))
    longer.reset(seed=0)
    assert [longer.step(np.zeros(1))[3] for _ in range(300)].index(True) == 299


def test_an_environments_own_rule_is_used():
    rule = describe(Lever(), limited(time_limit=3)).terminates
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
        (Shape(action_space=Box(-np.inf, np.inf, (2,))), ["without bounds", "TransformAction"]),
        (Shape(observation_space=Box(0, 255, (8, 8, 3), np.uint8)), ["images", "(8, 8, 3)"]),
        (Shape(observation_space=Box(0, 1, (84, 84, 3))), ["images", "(84, 84, 3)"]),
        (Shape(observation_space=spaces.Dict(eye=Box(0, 255, (8, 8), np.uint8))), ["images", "(8, 8)"]),
        (Shape(observation_space=spaces.Sequence(Discrete(2))), ["Sequence", "one vector"]),
        (Shape(observation_space=Box(-1, 1, (0,))), ["nothing"]),
        (Shape(action_space=Box(0, 3, (2,), np.int32)), ["int32", "continuous"]),
        (Shape(action_space=Box(np.zeros(2), np.array([1.0, 0.0]), dtype=np.float64)), ["without room"]),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_what_to_do(env, words):
    with pytest.raises(UserError) as problem:
        describe(env)
    for word in words:
        assert word in str(problem.value)
    assert "\n" not in str(problem.value)


def test_no_time_limit_is_needed():
    endless = Shape()
    spec = describe(endless)
    assert own_time_limit(endless) is None and spec.time_limit == 1000
    (note,) = time_limit_note(endless, spec, LoopConfig())
    assert "cut after 1000 steps" in note and "--loop.time-limit" in note and "\n" not in note
    assert time_limit_note(endless, spec, LoopConfig(time_limit=30)) == []
    assert describe(endless, Config(loop=LoopConfig(time_limit=30))).time_limit == 30
    assert describe(endless, Config(loop=LoopConfig(action_repeat=4))).time_limit == 250
    limited = gym.wrappers.TimeLimit(endless, 77)
    assert own_time_limit(limited) == 77 and time_limit_note(limited, describe(limited), LoopConfig()) == []


def test_an_episode_lasts_as_long_as_its_environment_says_or_is_cut():
    class Tired(Shape):
        """Truncates by itself, if at all."""

        def __init__(self, after: int | None):
            super().__init__()
            self.after = after

        def reset(self, *, seed=None, options=None):
            self.steps = 0
            return self.observation_space.sample(), {}

        def step(self, action):
            self.steps += 1
            return self.observation_space.sample(), 1.0, False, self.steps == self.after, {}

    def length(env: gym.Env) -> float:
        return EnvRunner(Simulator(env, describe(env)), 0).evaluate(0, None, 1)

    assert length(Tired(after=12)) == 12.0
    assert length(Tired(after=None)) == 1000.0


def test_unknown_ids_are_answered_with_the_nearest():
    with pytest.raises(UserError, match="paper/HalfCheetah"):
        make("paper/Halfcheeta")
    for name in ("Hopper-v9", "hopper-v5"):
        with pytest.raises(UserError, match="Hopper-v5"):
            make(name)


def test_bad_numbers_from_an_environment_are_named():
    class Broken(Lever):
        def step(self, action):
            return np.array([np.nan, 0.0]), 1.0, False, False, {}

    simulator = Simulator(Broken(), describe(Broken(), limited(time_limit=3)))
    simulator.reset(seed=0)
    with pytest.raises(UserError, match="Broken returned an observation"):
        simulator.step(np.zeros(2))


def test_never_is_never():
    assert not never(np.ones((4, 2))).any()


def test_observations_of_any_space_become_one_vector():
    space = spaces.Dict(
        joints=Box(-1, 1, (2, 2)),
        mode=Discrete(3),
        feet=spaces.Tuple([Box(0, 9, (1,), np.int64), spaces.MultiBinary(2)]),
    )
    seen = {"joints": np.arange(4.0).reshape(2, 2), "mode": 1, "feet": (np.array([7]), np.array([0, 1]))}

    class Body(Shape):
        def reset(self, *, seed=None, options=None):
            return seen, {}

    env = Body(observation_space=space, action_space=Box(-2, 2, (2, 3)))
    spec = describe(env, limited(time_limit=3))
    assert (spec.obs_size, spec.act_size) == (10, 6)
    flat = Simulator(env, spec).reset(seed=0)
    assert flat.dtype == np.float32
    np.testing.assert_array_equal(np.sort(flat), [0, 0, 0, 0, 1, 1, 1, 2, 3, 7])
    np.testing.assert_array_equal(flat, spec.layout.flatten(seen))


def test_an_observation_that_is_not_of_its_space_is_named():
    env = Shape(observation_space=spaces.Dict(a=Box(-1, 1, (2,))))
    with pytest.raises(UserError, match="not of its observation space"):
        Simulator(env, describe(env, limited(time_limit=3))).reset(seed=0)


@pytest.mark.parametrize(
    ("termination", "env_id", "expected"),
    [
        ("auto", "Hopper-v5", "known"),
        ("auto", "MountainCarContinuous-v0", "learned"),
        ("learned", "Hopper-v5", "learned"),
        ("never", "Hopper-v5", "never"),
        ("known", "Hopper-v5", "known"),
    ],
)
def test_how_the_model_knows_that_an_episode_ends(termination, env_id, expected):
    spec = describe(make(env_id), Config(termination=termination))
    assert spec.termination == expected
    assert (spec.rule is not None) == (expected == "known")


def test_a_rule_that_is_asked_for_must_be_known():
    with pytest.raises(UserError, match="no rule is known for MountainCarContinuous-v0"):
        describe(make("MountainCarContinuous-v0"), Config(termination="known"))


def test_module_and_function_name_an_environment(tmp_path, monkeypatch):
    (tmp_path / "my_robot.py").write_text(
        "import gymnasium as gym\n"
        "def make_env():\n    return gym.make('Pendulum-v1')\n"
        "def make_pie():\n    return 3.14\n"
        "flour = 500\n"
    )
    monkeypatch.chdir(tmp_path)
    assert factory("my_robot:make_env")().spec.id == "Pendulum-v1"
    for name, words in (
        ("my_robot:make_bread", "there is no function in my_robot .make_bread."),
        ("your_robot:make_env", "cannot be imported.*your_robot"),
        ("my_robot:make_pie", "returned a float"),
        ("my_robot:flour", "is a int"),
    ):
        with pytest.raises(UserError, match=words):
            make(name)


def test_gymnasiums_complaints_are_passed_on_in_a_line():
    assert complaints(gym.make("Pendulum-v1"), "Pendulum") == []

    class Sound(Lever):
        def reset(self, *, seed=None, options=None):
            gym.Env.reset(self, seed=seed)
            return np.zeros(2, np.float32), {}

        def step(self, action):
            return np.asarray(action, np.float32), 1.0, False, False, {}

    assert complaints(Sound(), "Sound") == []

    class OldStyle(Sound):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed)[0]

    with pytest.raises(
        UserError, match=r"OldStyle does not pass Gymnasium's check_env: .*\(obs, info\).*--no-check"
    ) as no:
        complaints(OldStyle(), "OldStyle")
    assert "\n" not in str(no.value)

    class Raises(Sound):
        def step(self, action):
            raise ZeroDivisionError("the motor is gone")

    with pytest.raises(UserError, match="ZeroDivisionError: the motor is gone"):
        complaints(Raises(), "Raises")
