"""Environments that may be machines: no command is sent that nobody decided."""

from contextlib import suppress
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box

import doublehorizon as dh
from doublehorizon.envs.make import Simulator, describe
from doublehorizon.errors import RunError
from doublehorizon.run.checkpoint_writer import CheckpointWriter
from doublehorizon.training.live_view import single_env_note
from worlds import TINY

CONFIG = TINY.with_(termination="never", loop__evaluation_episodes=0, loop__time_limit=1000)


class Plant(gym.Env):
    """Writes down every reset and every command. It never returns to where it was."""

    metadata = {"replay_episodes": False}  # noqa: RUF012 (Gymnasium's interface)
    observation_space, action_space = Box(-np.inf, np.inf, (3,)), Box(-1.0, 1.0, (1,))

    def __init__(self, log: Path):
        self.log = log

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.note("reset")
        return self.observe(), {}

    def step(self, action):
        self.note(f"{float(action[0]):.6f}")
        return self.observe(), 0.0, False, False, {}

    def observe(self):
        return self.np_random.normal(size=3).astype(np.float32)

    def note(self, what: str) -> None:
        with self.log.open("a") as file:
            file.write(what + "\n")


class Repeatable(Plant):
    """A simulator."""

    metadata = {}  # noqa: RUF012


class Elsewhere(Repeatable):
    """Its reset does not return to where it was, though it says nothing of it."""

    def observe(self):
        return np.random.default_rng().normal(size=3).astype(np.float32)


def commands(log: Path) -> list[str]:
    """Since the last call."""
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "commands"


@pytest.fixture(autouse=True)
def nothing_is_learnt(only_collecting):
    """These runs end before their first fit."""


def test_a_second_learn_continues_the_episode_of_an_object(log):
    config = CONFIG.with_(loop__seed_iterations=10)
    model = dh.DHMBPO(Plant(log), config=config, check=False).learn(20)
    assert len(commands(log)) == 1 + 20
    model.learn(40)
    assert len(found := commands(log)) == 40 and "reset" not in found


def test_an_object_that_somebody_else_has_moved_begins_a_new_episode(log, said):
    env = gym.wrappers.TimeLimit(Plant(log), 500)
    model = dh.DHMBPO(env, config=CONFIG.with_(loop__seed_iterations=10), check=False).learn(20)
    env.step(np.zeros(1, np.float32))
    commands(log)
    model.learn(20)
    assert (found := commands(log))[0] == "reset" and len(found) == 21
    assert "the interrupted episode is given up and a new one begins" in said[0]


class Skip(gym.Wrapper):
    """Holds each action for four steps, outside the time limit."""

    def step(self, action):
        for _ in range(3):
            self.env.step(action)
        return self.env.step(action)


def test_steps_that_a_wrapper_makes_are_nobody_elses(log):
    env = Skip(gym.wrappers.TimeLimit(Plant(log), 5000))
    dh.DHMBPO(env, config=CONFIG.with_(loop__seed_iterations=10), check=False).learn(60)
    assert commands(log).count("reset") == 1


def test_after_a_step_that_failed_a_new_episode_begins(log, said):
    env = Plant(log)
    model = dh.DHMBPO(env, config=CONFIG.with_(loop__seed_iterations=10), check=False).learn(20)
    model.get_env().step = lambda action: 1 // 0  # an instance's own, until it is deleted
    with pytest.raises(RunError, match="ZeroDivisionError"):
        model.learn(20)
    del env.step
    commands(log)
    model.learn(20)
    assert (found := commands(log))[0] == "reset" and len(found) == 21


@pytest.mark.parametrize("kind", [Plant, Elsewhere, "object", "never"])
def test_no_old_command_is_sent_when_a_run_is_resumed(kind, log, tmp_path, said):
    def make():
        return {"object": Repeatable(log), "never": Repeatable(log)}.get(kind) or kind(log)

    def interrupt(progress):
        if progress.step == 60:
            raise KeyboardInterrupt

    config = CONFIG.with_(loop__seed_iterations=10)
    env = make() if kind == "object" else make
    with pytest.raises(KeyboardInterrupt):
        dh.DHMBPO(env, config=config, check=False).learn(100, out=tmp_path / "run", callback=interrupt)
    commands(log)
    told = []
    again = "never" if kind == "never" else None
    model = dh.DHMBPO.load(tmp_path / "run", env=make() if kind == "object" else make, replay_episodes=again)
    model.resume(tmp_path / "run", 100, callback=lambda progress: told.append(len(said)))
    found = commands(log)
    new = 40 if kind == "object" else 60  # the run stood at step 40; steps of an object are not made again
    assert found.count("reset") == 1 and len(found) == 1 + new
    assert "the interrupted episode is given up and a new one begins" in said[0] and told[0] == 1


def test_a_simulator_continues_its_episode(log, tmp_path, said):
    config = CONFIG.with_(loop__seed_iterations=10)
    dh.DHMBPO(lambda: Repeatable(log), config=config, check=False).learn(40, out=tmp_path / "run")
    first = commands(log)
    dh.DHMBPO.load(tmp_path / "run", env=lambda: Repeatable(log)).resume(tmp_path / "run", 60)
    again = commands(log)
    assert again[: len(first)] == first and len(again) == len(first) + 20 and said == []


class Waiting(Plant):
    """Its episodes have 30 steps. It shows how many steps of an episode were made, and how often it was paused."""

    observe = None

    def __init__(self, log: Path):
        super().__init__(log)
        self.pauses = 0

    def reset(self, *, seed=None, options=None):
        self.note("reset")
        self.count = 0
        return self.now(), {}

    def step(self, action):
        self.note(f"{float(action[0]):.6f}")
        self.count += 1
        return self.now(), 1.0, False, self.count >= 30, {}

    def now(self):
        return np.array([self.count, self.pauses, 0.0], np.float32)


class Pausing(Waiting):
    """It moves a little while it is paused."""

    def pause(self):
        self.note("pause")

    def resume(self):
        self.note("resume")
        self.pauses += 1


class Seeing(Pausing):
    """And it can say where it is."""

    def observe(self):
        return self.now()


@pytest.fixture
def waits(monkeypatch, log):
    """Instead of learning, which takes long, a line in the log of the plant's commands."""

    def learn(progress, clock, view):
        with log.open("a") as file:
            file.write("learn\n")
        clock.lap("time/fit_seconds")
        clock.lap("time/improve_seconds")
        return {"train/repeats": np.zeros(1)}

    monkeypatch.setattr("doublehorizon.training.train.learn", learn)


def rows_of(model, count: int) -> dict[str, np.ndarray]:
    rows = model.progress.replay.rows
    return {name: np.asarray(getattr(rows, name))[0, :count] for name in ("obs", "next_obs", "act")}


def test_an_object_waits_between_two_episodes_and_no_step_is_lost(log, waits):
    model = dh.DHMBPO(Waiting(log), config=CONFIG).learn(140)
    lines = " ".join(commands(log)).split("reset")
    episodes = [part.split() for part in lines[1:]]
    sent = [float(line) for episode in episodes for line in episode if line != "learn"]
    assert all([line for line in episode if line != "learn"] == episode[:30] for episode in episodes)
    # iterations of 20 steps, the second one is the first to learn: 40 of 60, 60 of 60, 80 of 90, 100 of 120, ...
    assert [episode.count("learn") for episode in episodes] == [0, 2, 1, 2, 1]
    rows = rows_of(model, 140)
    np.testing.assert_allclose(rows["act"][:, 0], sent[:140], atol=1e-6)
    np.testing.assert_array_equal(rows["obs"][:, 0], np.arange(140) % 30)
    np.testing.assert_array_equal(rows["next_obs"][:, 0], np.arange(140) % 30 + 1)
    assert model.progress.state.ahead["reward"].shape == (1, 10)
    model.learn(20)  # ten of its steps are there already
    assert len(commands(log)) == 1 + 30 + 1
    np.testing.assert_array_equal(rows_of(model, 160)["obs"][:, 0], np.arange(160) % 30)


@pytest.mark.parametrize("kind", [Pausing, Seeing])
def test_an_object_that_can_pause_waits_where_it_is(kind, log, waits):
    model = dh.DHMBPO(kind(log), config=CONFIG).learn(80)
    lines = commands(log)
    learns = [k for k, line in enumerate(lines) if line == "learn"]
    beside = [(lines[k - 1], *lines[k + 1 : k + 2]) for k in learns]
    rows = rows_of(model, 80)
    if kind is Pausing:  # where it came to is not known: its episode ends there
        assert lines.count("reset") == 4 and beside == [("pause", "resume"), ("pause", "resume"), ("pause",)]
        np.testing.assert_array_equal(rows["obs"][:, 0], [*range(30), *range(10), *range(20), *range(20)])
        return
    assert beside == [("pause", "resume"), ("pause", "resume"), ("pause",)]
    assert lines[learns[1] + 2] == "reset"  # that wait was between two episodes
    np.testing.assert_array_equal(rows["obs"][:, 0], [*range(30), *range(30), *range(20)])
    np.testing.assert_array_equal(rows["next_obs"][38:41, 1], [0, 0, 1])
    np.testing.assert_array_equal(rows["obs"][38:42, 1], [0, 0, 1, 1])  # the first step after the wait is from there
    assert model.progress.state.ahead is None


def test_the_steps_of_an_interrupted_iteration_are_kept(log, tmp_path, waits, said):
    class Interrupting(Waiting):
        def step(self, action):
            if len(self.log.read_text().splitlines()) == 80:
                raise KeyboardInterrupt
            return super().step(action)

    with pytest.raises(KeyboardInterrupt):
        dh.DHMBPO(Interrupting(log), config=CONFIG).learn(200, out=tmp_path / "run")
    made = [float(line) for line in commands(log) if line not in ("reset", "learn")]
    model = dh.DHMBPO.load(tmp_path / "run", env=Waiting(log))
    assert model.num_timesteps == 60 and len(made) > 70
    model.resume(tmp_path / "run", 200)
    made += [float(line) for line in commands(log) if line not in ("reset", "learn")]
    np.testing.assert_allclose(rows_of(model, 200)["act"][:, 0], made[:200], atol=1e-6)
    assert len(made) < 200 + 30


def test_test_episodes_of_an_object_are_asked_for(log, waits):
    free = CONFIG.with_(loop__evaluation_episodes=None)
    assert dh.DHMBPO(Plant(log), config=free).evaluation_episodes == 0
    assert dh.DHMBPO(gym.make("Pendulum-v1"), config=free).evaluation_episodes == 10
    simulated = dh.DHMBPO(lambda: Plant(log), config=free, check=False)
    assert simulated.evaluation_episodes == 10
    simulated.set_env(Plant(log))  # from the simulator to the machine
    assert simulated.evaluation_episodes == 0
    single = free.with_(loop__single_env=True)
    assert dh.DHMBPO("Pendulum-v1", config=single).evaluation_episodes == 0
    log.unlink(missing_ok=True)
    dh.DHMBPO(Plant(log), config=free).learn(60)
    assert len([line for line in commands(log) if line != "learn"]) == 1 + 1000  # on to the end of the episode
    tested = CONFIG.with_(loop__evaluation_episodes=2, loop__time_limit=30)
    dh.DHMBPO(Plant(log), config=tested).learn(60)
    # at the start two test episodes, nothing was learnt afterwards; 60 steps in two episodes
    assert len([line for line in commands(log) if line != "learn"]) == 2 * 31 + 2 * 31


def test_a_single_environment_is_the_only_one(log, waits, said):
    made = []

    def make():
        made.append(Waiting(log))
        return made[-1]

    config = CONFIG.with_(loop__single_env=True, loop__evaluation_episodes=None)
    model = dh.DHMBPO(make, config=config).learn(60)
    assert len(made) == 1 and model.get_env() is made[0]
    assert len([line for line in commands(log) if line not in ("reset", "learn")]) == 60
    with pytest.raises(dh.UserError, match="serves one seed, but 2 environments are needed"):
        dh.DHMBPO(make, config=config, seeds=2)


def test_the_only_environment_is_introduced():
    assert single_env_note("X", False, 0, 0) == (
        "X is idle while the agent learns, which begins when the current episode has ended. No test episodes; "
        "--loop.evaluation-episodes N runs N per evaluation"
    )
    assert "paused. 3 test episodes per evaluation, up to 90 steps beside" in single_env_note("X", True, 3, 90)


def test_what_it_observes_passes_through_wrappers(log):
    env = gym.wrappers.TransformObservation(Seeing(log), lambda obs: 2 * obs, Box(-np.inf, np.inf, (3,)))
    simulator = Simulator(gym.wrappers.TimeLimit(env, 100), describe(env))
    np.testing.assert_array_equal(simulator.reset(0), [0, 0, 0])
    simulator.step(np.zeros(1))
    np.testing.assert_array_equal(simulator.observe(), [2, 0, 0])
    stacked = gym.wrappers.FrameStackObservation(Seeing(log), 2)
    simulator = Simulator(stacked, describe(stacked))
    simulator.reset(0)
    assert simulator.observe() is None


class Aliasing(Plant):
    """It returns its own array, which the next step changes."""

    def reset(self, *, seed=None, options=None):
        self.state = np.zeros(3, np.float32)
        return self.state, {}

    def step(self, action):
        self.state += 1.0
        return self.state, 0.0, False, False, {}


def test_an_array_that_the_environment_changes_is_copied(log):
    model = dh.DHMBPO(Aliasing(log), config=CONFIG.with_(loop__seed_iterations=10)).learn(20)
    rows = rows_of(model, 20)
    np.testing.assert_array_equal(rows["obs"][:, 0], np.arange(20))
    np.testing.assert_array_equal(rows["next_obs"][:, 0], 1 + np.arange(20))


class Stopping(Seeing):
    """Somebody presses Ctrl-C the third time that `where` is reached, and the fifth time after that."""

    where, left, again = "", 3, 5

    def interrupt(self, where: str) -> None:
        self.left -= where == self.where
        if self.left == 0:
            self.left, self.again = self.again, -1
            raise KeyboardInterrupt

    def pause(self):
        super().pause()
        self.interrupt("pause")

    def step(self, action):
        found = super().step(action)
        if self.count == 7:
            self.interrupt("step")
        return found


@pytest.mark.parametrize("where", ["checkpoint", "callback", "pause", "step"])
def test_no_step_is_lost_or_stored_twice_whenever_a_run_is_interrupted(where, log, tmp_path, waits, said, monkeypatch):
    """But the one that was interrupted, as it never returned."""
    env = Stopping(log)
    env.where, write = where, CheckpointWriter.write_if_due
    monkeypatch.setattr(CheckpointWriter, "write_if_due", lambda *a: (write(*a), env.interrupt("checkpoint")))
    model = dh.DHMBPO(env, config=CONFIG)
    for _ in range(3):
        with suppress(KeyboardInterrupt):
            left = 200 - model.num_timesteps
            model.learn(left, out=tmp_path / "run", callback=lambda progress: env.interrupt("callback"))
        assert commands_are_paused(log)
    made = [float(line) for line in commands(log) if line not in ("reset", "learn", "pause", "resume")]
    kept, rest = rows_of(model, 200)["act"][:, 0], iter(made)
    assert model.num_timesteps == 200 and env.again == -1
    assert all(any(abs(x - y) < 2e-6 for y in rest) for x in kept)  # in order, each once
    assert len(made) <= 200 + 2 * (where == "step")


def commands_are_paused(log: Path) -> bool:
    """The last word that it heard, but for learning."""
    lines = [line for line in log.read_text().splitlines() if line != "learn"]
    return lines[-1] == "pause"


def test_a_paused_environment_is_resumed_before_the_next_step(log, waits):
    """Also where the run went back to a state without a running episode."""

    class Interrupting(Pausing):
        def step(self, action):
            if self.count == 5 and not self.pauses:
                raise KeyboardInterrupt
            return super().step(action)

    model = dh.DHMBPO(Interrupting(log), config=CONFIG)
    with pytest.raises(KeyboardInterrupt):
        model.learn(20)
    assert commands(log)[-1] == "pause"
    model.learn(20)
    assert commands(log)[:2] == ["resume", "reset"]


def test_evaluating_too_early_leaves_a_machine_as_it_is(log, waits):
    model = dh.DHMBPO(Pausing(log), config=CONFIG).learn(40)
    commands(log)
    with pytest.raises(dh.UserError, match="nothing was learnt yet"):
        model.evaluate(1)
    assert commands(log) == []


def test_surplus_steps_are_kept_when_the_iteration_is_interrupted(log, waits):
    def interrupt(progress):
        if progress.step == 80:
            raise KeyboardInterrupt

    model = dh.DHMBPO(Waiting(log), config=CONFIG)
    with pytest.raises(KeyboardInterrupt):
        model.learn(200, callback=interrupt)
    assert model.num_timesteps == 60  # two episodes; the third one has the steps 60 to 90
    np.testing.assert_array_equal(model.progress.state.ahead["obs"][0, :, 0], np.arange(30))


class Looking(Waiting):
    """It cannot be paused, but say where it is."""

    def observe(self):
        return self.now()


def test_a_second_learn_begins_with_what_is_observed_then(log):
    env = Looking(log)
    model = dh.DHMBPO(env, config=CONFIG.with_(loop__seed_iterations=10)).learn(20)
    env.pauses = 7  # somebody has moved it
    model.learn(20)
    np.testing.assert_array_equal(rows_of(model, 40)["obs"][18:22, 1], [0, 0, 7, 7])
