"""A run that goes on is the run that was never stopped."""

import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doublehorizon as dh
from doublehorizon.algorithm.devices import fetch
from doublehorizon.run import checkpoint_writer
from doublehorizon.signals import Stopped, stoppable
from doublehorizon.training import learning_phase
from kept import differences, without_times
from worlds import TINY


def test_the_last_checkpoints_are_kept_and_the_replay_is_in_pieces(run):
    assert checkpoint_writer.steps_kept(run) == [60, 80, 100]
    pieces = sorted(path.name for path in (run / "replay").iterdir())
    assert pieces == [f"{rows:012d}.safetensors" for rows in (20, 40, 60, 80, 100)]
    assert json.loads((run / "config.json").read_text())["steps"] == 100


def test_a_run_goes_on_exactly_from_any_of_its_checkpoints(run, copy):
    for step in (100, 80):
        shutil.rmtree(copy / "checkpoints" / str(step))
        dh.DHMBPO.load(copy).resume(copy)
        assert not differences(run, copy)


def test_a_run_that_is_done_stays_as_it_is(run, copy):
    dh.DHMBPO.load(copy).resume(copy)
    assert not differences(run, copy)


def test_a_run_goes_on_to_more_steps(run, copy, tmp_path):
    model = dh.DHMBPO.load(copy).resume(copy, 130)
    assert model.num_timesteps == 140 and json.loads((copy / "config.json").read_text())["steps"] == 140
    with pytest.raises(dh.UserError, match="stands at step 140"):
        dh.DHMBPO.load(copy).resume(copy, 60)
    whole = tmp_path / "whole"
    dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY).learn(140, out=whole)
    assert without_times(copy / "progress.csv") == without_times(whole / "progress.csv")


def test_learning_in_two_parts_is_learning_at_once(run, tmp_path):
    model = dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY)
    model.learn(60, out=tmp_path / "parts")
    model.learn(40, out=tmp_path / "parts")
    assert without_times(tmp_path / "parts" / "progress.csv") == without_times(run / "progress.csv")


@pytest.mark.slow
def test_a_run_with_learnt_termination_and_several_environments_goes_on_exactly(tmp_path):
    config = replace(TINY, loop=replace(TINY.loop, num_envs=2))
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def model() -> dh.DHMBPO:
        return dh.DHMBPO("InvertedPendulum-v5", config=replace(config, termination="learned"))

    model().learn(80, out=whole)
    with pytest.raises(ZeroDivisionError):
        model().learn(80, out=cut, callback=lambda progress: 1 // (progress.step < 60))
    assert checkpoint_writer.steps_kept(cut)[-1] == 40
    dh.DHMBPO.load(cut).resume(cut)
    assert not differences(whole, cut)


@pytest.mark.slow
def test_a_run_from_records_goes_on_exactly(tmp_path):
    rng = np.random.default_rng(0)
    data = {
        "obs": rng.normal(size=(100, 3)),
        "act": rng.uniform(-2, 2, (100, 1)),
        "reward": rng.normal(size=100),
        "next_obs": rng.normal(size=(100, 3)),
        "terminated": np.zeros(100),
    }
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    dh.DHMBPO("Pendulum-v1", config=TINY, data=data).learn(40, out=whole)
    with pytest.raises(ZeroDivisionError):
        dh.DHMBPO("Pendulum-v1", config=TINY, data=data).learn(40, out=cut, callback=lambda p: 1 // 0)
    assert checkpoint_writer.steps_kept(cut) == [0]
    dh.DHMBPO.load(cut).resume(cut)
    assert not differences(whole, cut)


def test_another_machine_is_told(copy, monkeypatch):
    here = checkpoint_writer.machine
    monkeypatch.setattr("doublehorizon.run.checkpoint_reader.machine", lambda devices: here(devices) | {"cores": 999})
    model = dh.DHMBPO.load(copy)
    with pytest.warns(UserWarning, match=r"not bit for bit .*cores \d+ is now 999"):
        model.resume(copy)


def test_an_interrupted_learn_stands_at_the_end_of_an_iteration_and_can_go_on(run, tmp_path):
    model = dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY)

    def interrupt(progress):
        if progress.step == 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.learn(100, out=tmp_path / "cut", callback=interrupt)
    assert model.num_timesteps == 40
    model.learn(60, out=tmp_path / "cut")
    assert without_times(tmp_path / "cut" / "progress.csv") == without_times(run / "progress.csv")
    for a, b in zip(model.policies, dh.DHMBPO.load(run).policies, strict=True):
        np.testing.assert_array_equal(a.weights[0], b.weights[0])


def test_an_interrupt_saves_what_was_not_saved_yet(tmp_path):
    config = replace(TINY, loop=replace(TINY.loop, checkpoint_every=100))

    def interrupt(progress):
        if progress.step == 80:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dh.DHMBPO("Pendulum-v1", seeds=2, config=config).learn(100, out=tmp_path / "run", callback=interrupt)
    assert checkpoint_writer.steps_kept(tmp_path / "run") == [0, 60]
    pieces = sorted(path.stem for path in (tmp_path / "run" / "replay").iterdir())
    assert pieces == [f"{60:012d}"]


def test_a_signal_is_heard_while_the_device_works():
    work = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ x), x))
    x = jnp.eye(64)
    fetch(work(x, 1))  # compiled
    begun = time.monotonic()
    fetch(work(x, 2000))
    two_seconds = round(2000 * 2.0 / (time.monotonic() - begun))
    result = work(x, two_seconds)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped, match="SIGTERM"), stoppable():
        timer.start()
        fetch(result)
    assert not result.is_ready()  # it is still being computed: nobody has waited for it
    result.block_until_ready()


def test_a_signal_inside_an_iteration_leaves_the_run_at_its_last_boundary(monkeypatch):
    model, fetched = dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY), learning_phase.fetch

    def interrupted(tree):
        if model.num_timesteps == 60:  # the second iteration that learns has stored its steps, and is being fitted
            os.kill(os.getpid(), signal.SIGTERM)
        return fetched(tree)

    monkeypatch.setattr(learning_phase, "fetch", interrupted)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        model.learn(100)
    assert model.num_timesteps == 40 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_agent_that_was_overtaken_does_not_undo_the_run(copy):
    stale = dh.DHMBPO.load(copy)
    dh.DHMBPO.load(copy).resume(copy, 140)
    before = (copy / "progress.csv").read_text()
    with pytest.raises(dh.UserError, match="has gone on to step 140, but this agent stands at step 100"):
        stale.resume(copy, 120)
    assert checkpoint_writer.steps_kept(copy)[-1] == 140 and (copy / "progress.csv").read_text() == before


def test_learning_elsewhere_in_between_leaves_the_logs_alone(copy):
    before = (copy / "progress.csv").read_text()
    model = dh.DHMBPO.load(copy).learn(20)
    model.learn(20, out=copy)
    assert (copy / "progress.csv").read_text().startswith(before)
    assert checkpoint_writer.steps_kept(copy)[-1] == 140


def test_an_agent_saved_in_a_callback_is_exact(run, tmp_path):
    model = dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY)
    model.learn(100, callback=lambda p: model.save(tmp_path / "agent") if p.step == 80 else None)
    later = dh.DHMBPO.load(tmp_path / "agent").learn(20)
    for a, b in zip(model.policies, later.policies, strict=True):
        np.testing.assert_array_equal(a.weights[0], b.weights[0])


@pytest.mark.slow
def test_a_full_ring_loses_nothing_to_an_interrupt(tmp_path):
    loop = replace(TINY.loop, checkpoint_every=100, replay_capacity=60)
    config = replace(TINY, loop=loop)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    dh.DHMBPO("Pendulum-v1", seeds=2, config=config).learn(160, out=whole)
    with pytest.raises(ZeroDivisionError):
        model = dh.DHMBPO("Pendulum-v1", seeds=2, config=config)
        model.learn(160, out=cut, callback=lambda progress: 1 // (progress.step < 120))
    with pytest.raises(dh.UserError, match="stopped inside an iteration"):
        model.learn(20)
    dh.DHMBPO.load(cut).resume(cut)
    assert not differences(whole, cut)


def test_a_new_goal_is_remembered_at_once(copy):
    with pytest.raises(ZeroDivisionError):
        dh.DHMBPO.load(copy).learn(60, out=copy, callback=lambda progress: 1 // 0)
    assert dh.DHMBPO.load(copy)._progress.goal == 160  # type: ignore[union-attr]


def test_a_run_is_not_given_what_it_did_not_have(copy):
    with pytest.raises(dh.UserError, match="trained without a reward"):
        dh.DHMBPO.load(copy, reward=lambda obs, act, next_obs: obs[..., 0])
    with pytest.raises(dh.UserError, match="is not from"):
        dh.DHMBPO("Pendulum-v1", config=TINY).resume(copy)


def test_without_its_config_a_run_goes_on_too(copy):
    (copy / "config.json").unlink()
    assert dh.DHMBPO.load(copy).resume(copy, 120).num_timesteps == 120
