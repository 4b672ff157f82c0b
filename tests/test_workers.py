import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from doublehorizon.acting.env_runner import RunnerGroup, WorkerSpec, stuck_at
from doublehorizon.acting.workers import WorkerPool
from doublehorizon.envs.make import describe, factory, make
from doublehorizon.errors import RunError, UserError
from test_machines import Plant, Repeatable, commands

SPEC = describe(make("Pendulum-v1"))
pytestmark = pytest.mark.processes


def pool(seeds: list[int], in_process: bool = False, env="Pendulum-v1") -> WorkerPool:
    spec = WorkerSpec(factory(env), SPEC)
    return WorkerPool(spec, seeds, runners=RunnerGroup(spec) if in_process else None)


def test_a_seed_collects_the_same_whoever_is_beside_it():
    with pool([3, 4, 5]) as many, pool([4], in_process=True) as one:
        together, alone = many.collect(None, 250), one.collect(None, 250)
    assert together["obs"].shape == (3, 250, 3)
    for name, value in alone.items():
        np.testing.assert_array_equal(together[name][1], value[0])
    assert not np.array_equal(together["obs"][0], together["obs"][1])


def test_chance_depends_on_where_the_run_stands():
    with pool([0], in_process=True) as first, pool([0], in_process=True) as later:
        one, other = first.collect(None, 20), later.collect(None, 20, step=100)
    assert not np.isclose(one["obs"], other["obs"]).all(axis=-1).any()
    assert not np.isclose(one["act"], other["act"]).any()


def test_a_factory_that_cannot_be_sent_is_named():
    lock = threading.Lock()

    def make_it():
        return lock

    with pytest.raises(UserError, match="cannot be sent to worker processes"):
        pool([0], env=make_it)


def test_episodes_go_on_across_calls_and_rows_are_linked():
    with pool([0], in_process=True) as workers:
        first, second = workers.collect(None, 120), workers.collect(None, 130, step=120)
    joined = {name: np.concatenate([first[name], second[name]], axis=1) for name in first}
    next_obs, obs = joined["next_obs"][0, :-1], joined["obs"][0, 1:]
    linked = (next_obs == obs).all(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(~linked), [199])  # the time limit of 200 steps
    assert not joined["terminated"].any()


def test_a_running_episode_goes_on_in_another_crew():
    with pool([0, 1]) as whole:
        whole.collect(None, 120)
        running = whole.episodes
        expected = whole.collect(None, 130, step=120)
    assert running[1, 0].actions.shape == (120, 1)
    with WorkerPool(WorkerSpec(factory("Pendulum-v1"), SPEC), [0, 1], episodes=running) as other:
        found = other.collect(None, 130, step=120)
        assert other.pop_notes() == []
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_an_environment_that_does_not_repeat_itself_begins_a_new_episode_and_says_so():
    class Drifting(gym.ObservationWrapper):
        def observation(self, observation):
            return observation + np.random.default_rng().normal(size=3).astype(np.float32)  # seeded by nothing

    worker_spec = WorkerSpec(lambda: Drifting(gym.make("Pendulum-v1").unwrapped), SPEC)
    with WorkerPool(worker_spec, [0], runners=RunnerGroup(worker_spec)) as first:
        first.collect(None, 30)
    with WorkerPool(worker_spec, [0], runners=RunnerGroup(worker_spec), episodes=first.episodes) as later:
        later.collect(None, 10, step=30)
        (note,) = later.pop_notes()
    assert "seed 0" in note and "does not repeat itself" in note
    assert later.episodes[0, 0].actions.shape == (10, 1)


def test_evaluations_run_in_the_background_and_are_seeded_by_the_step():
    with pool([0, 1, 2]) as remote, pool([1], in_process=True) as local:
        for step in (0, 1000):
            remote.start_evaluation(None, step, 2)
        found = {(step, seed): tuple(values) for step, seed, values in remote.finished_evaluations(block=True)}
        local.start_evaluation(None, 1000, 2)
        ((_, _, alone),) = local.finished_evaluations(block=True)
    assert set(found) == {(step, seed) for step in (0, 1000) for seed in (0, 1, 2)}
    assert found[1000, 1] == tuple(alone) and len(alone) == 2
    assert len(set(found.values())) == 6


def altered(step):
    """Pendulum whose 7th step is another."""

    def make_it():
        class Altered(gym.Wrapper):
            count = 0

            def step(self, action):
                self.count += 1
                return step(self, action) if self.count == 7 else self.env.step(action)

        return Altered(gym.make("Pendulum-v1"))

    return make_it


def raise_it(env, action):
    raise ZeroDivisionError("the motor is gone")


def no_number(env, action):
    obs, _, *rest = env.env.step(action)
    return obs, np.nan, *rest


def too_long(env, action):
    return np.zeros(5), *env.env.step(action)[1:]


def vanish(env, action):
    import os

    os._exit(3)


def vanish_but_leave_a_child(env, action):
    """The child holds all that was open, as C's `fork` tells Python nothing."""
    import ctypes
    import os
    import time

    if ctypes.CDLL(None).fork() == 0:
        time.sleep(60)
    os._exit(3)


def fall_asleep(env, action):
    import time

    time.sleep(60)


@pytest.mark.parametrize(
    ("step", "kind", "words"),
    [
        (raise_it, RunError, [r"Pendulum-v1 failed \(seed 4, step 106\)", "the motor is gone", "in raise_it"]),
        (no_number, UserError, ["reward nan", r"\(seed 4, step 106\)"]),
        (too_long, UserError, ["5 values", r"\(seed 4, step 106\)"]),
        (vanish, RunError, ["worker process of Pendulum-v1 died", r"status 3; seed\(s\) 4", "restarted 3 times"]),
        (vanish_but_leave_a_child, RunError, ["worker process of Pendulum-v1 died", "status 3", "restarted 3 times"]),
        (fall_asleep, RunError, ["did not come back within 0.5 s", "seed 4, about step 10", "in fall_asleep"]),
    ],
)
def test_a_fault_of_the_environment_is_told_with_seed_and_step(step, kind, words):
    worker_spec = WorkerSpec(altered(step), SPEC, step_timeout=0.5)
    with WorkerPool(worker_spec, [4]) as workers:
        with pytest.raises(kind) as problem:
            workers.collect(None, 20, step=100)
        for word in words:
            assert re.search(word, str(problem.value)), word
        processes = processes_of(workers)
    assert all(process.poll() is not None for process in processes)
    assert not [process.pid for process in processes if members_of_group(process.pid)]


def members_of_group(group: int) -> list[int]:
    """Processes that a worker has left behind."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has gone in the meantime
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            found += [int(path.parent.name)] if int(its_group) == group and state != "Z" else []
    return found


def test_a_python_child_of_the_environment_does_not_hold_the_pipe(tmp_path):
    """The pipe closes with the worker, so its death is seen long before the process is polled."""

    def fork_and_vanish(env, action):
        import os
        import time

        if os.fork() == 0:
            time.sleep(60)
        os._exit(3)

    from doublehorizon.acting import workers as module

    with pytest.MonkeyPatch.context() as patch, WorkerPool(WorkerSpec(altered(fork_and_vanish), SPEC), [4]) as workers:
        patch.setattr(module, "_LOOK_EVERY", 50.0)
        begun = time.monotonic()
        with pytest.raises(RunError, match="restarted 3 times"):
            workers.collect(None, 20)
        assert time.monotonic() - begun < 40


def test_a_process_is_stuck_after_five_alarms():
    """One more than fill the timeout: a process that was stopped raises one when it continues."""
    alarm = "Timeout (0:00:01)!\nThread 1:\n  in step\n"
    assert stuck_at("") == (None, "") and stuck_at("4 10\n") == ((4, 10), "")
    assert stuck_at("4 10\n" + 4 * alarm) == ((4, 10), "")
    assert stuck_at("4 10\n" + 5 * alarm) == ((4, 10), alarm)
    assert stuck_at(alarm)[0] is None


def test_a_worker_that_was_stopped_goes_on():
    """As by Ctrl-Z or where a laptop sleeps, for longer than a step may take."""
    with WorkerPool(WorkerSpec(altered(sleep_a_little), SPEC, step_timeout=1.0), [0]) as workers:
        workers.collect(None, 3)
        (process, *_) = processes_of(workers)
        stopper = threading.Timer(0.2, stop_for, [process, 2.5])
        stopper.start()
        assert workers.collect(None, 10)["obs"].shape == (1, 10, 3)
        stopper.join()
        assert workers.pop_notes() == []


def sleep_a_little(env, action):
    import time

    time.sleep(0.5)
    return env.env.step(action)


def stop_for(process: subprocess.Popen, seconds: float) -> None:
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    process.send_signal(signal.SIGCONT)


def test_workers_leave_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pool([0]) as workers:
        workers.collect(None, 5)
        assert list(tmp_path.iterdir()) == []  # so nothing is left even by a process that is killed


def test_a_pause_between_calls_is_no_hang():
    with WorkerPool(WorkerSpec(factory("Pendulum-v1"), SPEC, step_timeout=0.3), [0]) as workers:
        before = workers.collect(None, 5)
        time.sleep(1.0)
        after = workers.collect(None, 5)
    np.testing.assert_array_equal(before["next_obs"][0, -1], after["obs"][0, 0])  # the same episode goes on


def processes_of(pool: WorkerPool) -> list[subprocess.Popen]:
    return [worker._process for worker in (*pool._collectors, *pool._evaluators)]  # type: ignore[union-attr]


def test_a_worker_that_dies_is_replaced_and_nothing_is_lost():
    with pool([0, 1]) as whole, pool([0, 1]) as wounded:
        for workers in (whole, wounded):
            workers.collect(None, 30)
        for process in processes_of(wounded):
            process.kill()
            process.wait()
        expected, found = (workers.collect(None, 30, step=30) for workers in (whole, wounded))
        for workers in (whole, wounded):
            workers.start_evaluation(None, 60, 1)
        assert sorted(whole.finished_evaluations(block=True)) == sorted(wounded.finished_evaluations(block=True))
        notes = wounded.pop_notes()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
    assert len(notes) >= 2 and all("killed by signal 9" in note and "restarted" in note for note in notes)


@pytest.mark.parametrize("kind", [Plant, Repeatable])
def test_a_worker_that_died_repeats_no_command_of_a_machine(kind, tmp_path):
    log = tmp_path / "commands"
    spec = describe(kind(log))
    worker = WorkerSpec(lambda: kind(log), spec, replays=kind is Repeatable)
    with WorkerPool(worker, [0]) as workers:
        workers.collect(None, 30)
        assert len(commands(log)) == 1 + 30
        for process in processes_of(workers):
            process.kill()
            process.wait()
        workers.collect(None, 10, step=30)
        assert len(commands(log)) == 1 + (10 if kind is Plant else 40)
        assert ("a new one begins" in " ".join(workers.pop_notes())) == (kind is Plant)


def test_a_test_whose_worker_died_is_not_waited_for(tmp_path):
    gate = tmp_path / "open"

    def gated():
        class Gated(gym.Wrapper):
            def step(self, action):
                while not gate.exists():
                    time.sleep(0.01)
                return super().step(action)

        return Gated(gym.make("Pendulum-v1"))

    with WorkerPool(WorkerSpec(gated, SPEC, step_timeout=20.0), [0]) as workers, pool([0]) as whole:
        workers.start_evaluation(None, 0, 1)
        process = processes_of(workers)[-1]
        process.kill()
        process.wait()
        assert workers.finished_evaluations() == []  # another process has begun it anew, behind the gate
        assert workers.finished_evaluations() == []
        gate.touch()
        whole.start_evaluation(None, 0, 1)
        assert workers.finished_evaluations(block=True) == whole.finished_evaluations(block=True)
        assert len(workers.pop_notes()) == 1


ENDLESS_RUN = """
import gymnasium as gym, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs us in the background turns it off
from doublehorizon.envs.make import describe, make
from doublehorizon.acting.env_runner import RunnerGroup, WorkerSpec
from doublehorizon.acting.workers import WorkerPool
def sleepy():
    class Sleepy(gym.Wrapper):
        def step(self, action):
            time.sleep(30)
    return Sleepy(gym.make("Pendulum-v1"))
with WorkerPool(WorkerSpec(sleepy, describe(make("Pendulum-v1"))), [0, 1]) as pool:
    print(*(w._process.pid for w in (*pool._collectors, *pool._evaluators)), flush=True)
    pool.start_evaluation(None, 0, 1)
    pool.collect(None, 5)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_a_run_that_is_stopped(how):
    run = subprocess.Popen(
        [sys.executable, "-c", ENDLESS_RUN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in run.stdout.readline().split()]
    assert len(pids) >= 2
    time.sleep(1.0)
    run.send_signal(how)
    run.communicate(timeout=20)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(is_running(pid) for pid in pids):
        time.sleep(0.1)
    assert not [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_workers_leave_with_their_crew():
    workers = pool([0, 1])
    processes = processes_of(workers)
    workers.close()
    assert all(process.poll() is not None for process in processes)


def test_neither_workers_nor_policies_import_jax():
    modules = "doublehorizon, doublehorizon.acting.workers, doublehorizon.acting.policy, doublehorizon.envs.registry"
    code = f"import sys, {modules}; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_workers_do_not_import_what_lies_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "cloudpickle.py").write_text("raise SystemExit('a run folder is no place for code')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    with pool([0]) as workers:
        assert workers.collect(None, 5)["obs"].shape == (1, 5, 3)
        assert workers.pop_notes() == []
