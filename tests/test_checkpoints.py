"""What is saved is what was there; what is damaged is recognised; what goes wrong with the disk harms nothing."""

import errno
import json
import os
import shutil
import threading
import time
from pathlib import Path

import gymnasium as gym
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import doublehorizon as dh
from doublehorizon import checkpoints, chunks, durable
from doublehorizon.analysis.curves import task_of
from doublehorizon.cli.resume import _is_deterministic
from doublehorizon.config import LoopConfig
from doublehorizon.errors import RunError
from doublehorizon.progress import Archived
from doublehorizon.replay import add, empty
from doublehorizon.saved import read_newest
from doublehorizon.types import Transition
from worlds import TINY

EACH = LoopConfig(
    steps_per_iteration=20, seed_iterations=2, evaluate_every=2, evaluation_episodes=1, checkpoint_every=1
)
CONFIG = TINY.__class__(**{**TINY.__dict__, "loop": EACH})


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of 100 steps with its last checkpoints at 60, 80 and 100."""
    folder = tmp_path_factory.mktemp("run") / "run"
    dh.DHMBPO("Pendulum-v1", seeds=2, config=CONFIG).learn(100, out=folder)
    return folder


@pytest.fixture
def copy(run, tmp_path) -> Path:
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


def same_end(one: Path, other: Path) -> None:
    """The same curves, but for times, and the same last checkpoint."""
    for name in ("eval.csv", "progress.csv"):
        assert without_times(one / name) == without_times(other / name)
    step = checkpoints.steps_kept(one)[-1]
    files = [(folder / "checkpoints" / str(step) / "state.safetensors").read_bytes() for folder in (one, other)]
    assert files[0] == files[1]


def without_times(path: Path) -> list[list[str]]:
    header, *rows = [line.split(",") for line in path.read_text().splitlines()]
    kept = [i for i, name in enumerate(header) if not name.startswith("time") or name == "time/total_timesteps"]
    return [[row[i] for i in kept] for row in (header, *rows)]


def test_the_last_checkpoints_are_kept_and_the_replay_is_in_pieces(run):
    assert checkpoints.steps_kept(run) == [60, 80, 100]
    pieces = sorted(path.name for path in (run / "replay").iterdir())
    assert pieces == [f"{rows:012d}.safetensors" for rows in (20, 40, 60, 80, 100)]
    assert json.loads((run / "config.json").read_text())["steps"] == 100


def test_a_run_goes_on_exactly_from_any_of_its_checkpoints(run, copy):
    for step in (100, 80):
        shutil.rmtree(copy / "checkpoints" / str(step))
        dh.DHMBPO.load(copy).resume(copy)
        same_end(run, copy)


def test_a_run_that_is_done_stays_as_it_is(run, copy):
    dh.DHMBPO.load(copy).resume(copy)
    same_end(run, copy)


def test_a_run_goes_on_to_more_steps(run, copy, tmp_path):
    model = dh.DHMBPO.load(copy).resume(copy, 130)
    assert model.num_timesteps == 140 and json.loads((copy / "config.json").read_text())["steps"] == 140
    with pytest.raises(dh.UserError, match="stands at step 140"):
        dh.DHMBPO.load(copy).resume(copy, 60)
    whole = tmp_path / "whole"
    dh.DHMBPO("Pendulum-v1", seeds=2, config=CONFIG).learn(140, out=whole)
    assert without_times(copy / "progress.csv") == without_times(whole / "progress.csv")


def test_learning_in_two_parts_is_learning_at_once(run, tmp_path):
    model = dh.DHMBPO("Pendulum-v1", seeds=2, config=CONFIG)
    model.learn(60, out=tmp_path / "parts")
    model.learn(40, out=tmp_path / "parts")
    assert without_times(tmp_path / "parts" / "progress.csv") == without_times(run / "progress.csv")


def test_a_run_with_learnt_termination_and_several_environments_goes_on_exactly(tmp_path):
    config = TINY.__class__(**{**CONFIG.__dict__, "loop": LoopConfig(**{**EACH.__dict__, "num_envs": 2})})
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def model() -> dh.DHMBPO:
        return dh.DHMBPO("InvertedPendulum-v5", config=TINY.__class__(**{**config.__dict__, "termination": "learned"}))

    model().learn(80, out=whole)
    with pytest.raises(ZeroDivisionError):
        model().learn(80, out=cut, callback=lambda progress: 1 // (progress.step < 60))
    assert checkpoints.steps_kept(cut)[-1] == 40
    dh.DHMBPO.load(cut).resume(cut)
    same_end(whole, cut)


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
    dh.DHMBPO("Pendulum-v1", config=CONFIG, data=data).learn(40, out=whole)
    with pytest.raises(ZeroDivisionError):
        dh.DHMBPO("Pendulum-v1", config=CONFIG, data=data).learn(40, out=cut, callback=lambda p: 1 // 0)
    assert checkpoints.steps_kept(cut) == [0]
    dh.DHMBPO.load(cut).resume(cut)
    same_end(whole, cut)


def test_a_file_is_never_imported_from(copy):
    for checkpoint in (copy / "checkpoints").iterdir():
        path = checkpoint / "checkpoint.json"
        about = json.loads(path.read_text())["checkpoint"]
        about["env"] |= {"name": "os:system", "registered": True}
        sealed = {"digest": durable.digest(checkpoints.canonical(about)), "checkpoint": about}
        path.write_text(json.dumps(sealed))
    with pytest.raises(dh.UserError, match="pass the environment too"):
        dh.DHMBPO.load(copy)
    assert dh.DHMBPO.load(copy, env="Pendulum-v1").num_timesteps == 100


def test_a_link_is_not_followed(copy, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    model = dh.DHMBPO.load(copy)
    (copy / "progress.csv").unlink()
    (copy / "progress.csv").symlink_to(precious)
    with pytest.raises(dh.UserError, match=r"progress\.csv is a link"):
        model.resume(copy, 120)
    assert precious.read_text() == "keep me"


def test_only_one_process_trains_in_a_folder(copy):
    model = dh.DHMBPO.load(copy)
    with durable.locked(copy), pytest.raises(dh.UserError, match="another process is training"):
        model.resume(copy, 120)


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(run, copy):
    state = copy / "checkpoints" / "100" / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    model = dh.DHMBPO.load(copy)
    assert model.num_timesteps == 80
    with pytest.warns(UserWarning, match="step 100 cannot be used: its state.safetensors is damaged"):
        model.resume(copy)
    same_end(run, copy)


def test_without_a_whole_checkpoint_the_first_damage_is_told(copy):
    piece = copy / "replay" / f"{20:012d}.safetensors"
    piece.write_bytes(piece.read_bytes()[:-1])
    with pytest.raises(dh.UserError, match=r"no checkpoint that is whole; the checkpoint at step 100 .*0020.*damaged"):
        dh.DHMBPO.load(copy)
    with pytest.raises(dh.UserError, match="holds no checkpoint"):
        dh.DHMBPO.load(copy / "policy")


def test_a_checkpoint_of_another_version_says_which(copy):
    path = copy / "checkpoints" / "100" / "checkpoint.json"
    about = json.loads(path.read_text())["checkpoint"] | {"format": "doublehorizon-checkpoint-9", "version": "9.1"}
    path.write_text(json.dumps({"digest": durable.digest(checkpoints.canonical(about)), "checkpoint": about}))
    with pytest.raises(dh.UserError, match=r"written by doublehorizon 9\.1 in the format 'doublehorizon-checkpoint-9'"):
        dh.DHMBPO.load(copy)


def test_another_machine_is_told(copy, monkeypatch):
    here = checkpoints.machine
    monkeypatch.setattr("doublehorizon.saved.machine", lambda devices: here(devices) | {"cores": 999})
    model = dh.DHMBPO.load(copy)
    with pytest.warns(UserWarning, match=r"not bit for bit .*cores \d+ is now 999"):
        model.resume(copy)


files = st.sampled_from(
    ["checkpoints/100/checkpoint.json", "checkpoints/100/state.safetensors", f"replay/{100:012d}.safetensors"]
)


@settings(max_examples=200, deadline=None)
@given(
    files, st.integers(0, 10**6), st.binary(min_size=1, max_size=100), st.sampled_from(["cut", "overwrite", "insert"])
)
def test_whatever_happens_to_a_file_it_is_noticed(run, name, place, noise, how):
    path = run / name
    whole = path.read_bytes()
    at = place % len(whole)
    behind = {"cut": b"", "overwrite": noise + whole[at + len(noise) :], "insert": noise + whole[at:]}[how]
    try:
        path.write_bytes(whole[:at] + behind)
        saved, problems = read_newest(run)
        if path.read_bytes() == whole or _same_json(path, whole):
            assert saved.path.name == "100" and not problems
        else:
            assert saved.path.name == "80" and "step 100 cannot be used" in problems[0]
    finally:
        path.write_bytes(whole)


def _same_json(path: Path, whole: bytes) -> bool:
    """White space, for one, changes nothing."""
    try:
        return path.suffix == ".json" and json.loads(path.read_bytes()) == json.loads(whole)
    except ValueError:
        return False


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.sampled_from([b"[" * 100_000, b'{"config": 3}', b'{"env": []}', b"null"]))
def test_a_damaged_config_is_no_traceback(run, content):
    # what is needed to go on is in the checkpoints: config.json is for people and for plots
    path = run / "config.json"
    whole = path.read_bytes()
    try:
        path.write_bytes(content)
        assert not _is_deterministic(run)
        assert task_of(run) is None or isinstance(task_of(run), str)
        assert read_newest(run)[0].path.name == "100"
    finally:
        path.write_bytes(whole)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=40))
def test_a_damaged_policy_is_refused(run, place, noise):
    path = run / "policy" / "seed0.safetensors"
    whole = path.read_bytes()
    at = place % len(whole)
    try:
        path.write_bytes(whole[:at] + noise + whole[at + len(noise) :])
        dh.load_policy(path)
        assert path.read_bytes() == whole
    except dh.UserError as problem:
        assert "\n" not in str(problem)
    finally:
        path.write_bytes(whole)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=25, deadline=None)
@given(st.data(), values)
def test_a_forged_checkpoint_is_refused_or_harmless(run, data, value):
    load_forged(run, data, value)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(st.data(), values)
def test_many_forged_checkpoints_are_refused_or_harmless(run, data, value):
    load_forged(run, data, value)


def load_forged(run, data, value) -> None:
    """Its digest is right, so only what it says can give it away."""
    path = run / "checkpoints" / "100" / "checkpoint.json"
    whole = path.read_bytes()
    about = json.loads(whole)["checkpoint"]
    place = data.draw(st.sampled_from(list(_places(about))))
    inner = about
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    try:
        path.write_text(json.dumps({"digest": durable.digest(checkpoints.canonical(about)), "checkpoint": about}))
        model = dh.DHMBPO.load(run, device="cpu")
        assert model.num_timesteps in (80, 100)
    except dh.UserError as problem:
        assert "\n" not in str(problem).strip()
    finally:
        path.write_bytes(whole)


def _places(about, path=()):
    for key, value in about.items() if isinstance(about, dict) else enumerate(about):
        yield (*path, key)
        if isinstance(value, dict | list) and value:
            yield from _places(value, (*path, key))


def failing(monkeypatch, problem: OSError, name: str) -> None:
    """From now on the disk refuses to take files whose name has that in it."""
    replace = os.replace

    def refuse(source, target):
        if name in str(target):
            raise problem
        replace(source, target)

    monkeypatch.setattr(durable.os, "replace", refuse)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("name", ["state.safetensors", "replay/000000000120"])
def test_a_disk_that_fails_leaves_the_checkpoints_intact(copy, monkeypatch, code, name):
    model = dh.DHMBPO.load(copy)
    failing(monkeypatch, OSError(code, os.strerror(code)), name)
    with pytest.raises(RunError, match=f"copy cannot be written: {os.strerror(code)}. What was saved"):
        model.resume(copy, 160)
    monkeypatch.undo()
    assert not list(copy.rglob("*.partial"))
    stands = 100 if name == "state.safetensors" else 140  # the last attempt of all may write other files
    assert dh.DHMBPO.load(copy).num_timesteps == stands


def test_a_folder_that_disappears_is_told(copy):
    def remove(progress):
        shutil.rmtree(copy)

    with pytest.raises(RunError, match=r"cannot be written: No such file"):
        dh.DHMBPO.load(copy).learn(60, out=copy, callback=remove)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(dh.UserError, match="cannot be written"):
        dh.DHMBPO("Pendulum-v1", config=TINY).learn(20, out=tmp_path / "file" / "run")


def test_logs_that_are_missing_are_told_and_the_run_goes_on(copy):
    (copy / "eval.csv").unlink()
    with pytest.warns(UserWarning, match="shorter than it was"):
        dh.DHMBPO.load(copy).resume(copy, 120)
    assert (copy / "eval.csv").read_text().startswith("step,time,reward,seed")


def test_an_interrupted_learn_stands_at_the_end_of_an_iteration_and_can_go_on(run, tmp_path):
    model = dh.DHMBPO("Pendulum-v1", seeds=2, config=CONFIG)

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
    config = TINY.__class__(**{**CONFIG.__dict__, "loop": LoopConfig(**{**EACH.__dict__, "checkpoint_every": 100})})

    def interrupt(progress):
        if progress.step == 80:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dh.DHMBPO("Pendulum-v1", seeds=2, config=config).learn(100, out=tmp_path / "run", callback=interrupt)
    assert checkpoints.steps_kept(tmp_path / "run") == [0, 60]
    pieces = sorted(path.stem for path in (tmp_path / "run" / "replay").iterdir())
    assert pieces == [f"{60:012d}"]


def test_a_signal_is_heard_while_the_device_works(monkeypatch):
    import signal

    model = dh.DHMBPO("Pendulum-v1", seeds=2, config=CONFIG)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))

    def wait(progress):
        if progress.step == 60:
            timer.start()
            time.sleep(20)

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        model.learn(100, callback=wait)
    assert time.monotonic() - begun < 60 and model.num_timesteps == 40
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
def test_an_environment_object_goes_on_from_its_episode(tmp_path):
    env = gym.make("Pendulum-v1")
    model = dh.DHMBPO(env, config=CONFIG).learn(60)
    model.save(tmp_path / "agent")
    model.learn(20)
    other = dh.DHMBPO.load(tmp_path / "agent", env=gym.make("Pendulum-v1")).learn(20)
    np.testing.assert_array_equal(model.policies[0].weights[0], other.policies[0].weights[0])


def test_an_agent_that_was_overtaken_does_not_undo_the_run(copy):
    stale = dh.DHMBPO.load(copy)
    dh.DHMBPO.load(copy).resume(copy, 140)
    before = (copy / "progress.csv").read_text()
    with pytest.raises(dh.UserError, match="has gone on to step 140, but this agent stands at step 100"):
        stale.resume(copy, 120)
    assert checkpoints.steps_kept(copy)[-1] == 140 and (copy / "progress.csv").read_text() == before


def test_learning_elsewhere_in_between_leaves_the_logs_alone(copy):
    before = (copy / "progress.csv").read_text()
    model = dh.DHMBPO.load(copy).learn(20)
    model.learn(20, out=copy)
    assert (copy / "progress.csv").read_text().startswith(before)
    assert checkpoints.steps_kept(copy)[-1] == 140


def test_an_agent_saved_in_a_callback_is_exact(run, tmp_path):
    model = dh.DHMBPO("Pendulum-v1", seeds=2, config=CONFIG)
    model.learn(100, callback=lambda p: model.save(tmp_path / "agent") if p.step == 80 else None)
    later = dh.DHMBPO.load(tmp_path / "agent").learn(20)
    for a, b in zip(model.policies, later.policies, strict=True):
        np.testing.assert_array_equal(a.weights[0], b.weights[0])


@pytest.mark.slow
def test_a_full_ring_loses_nothing_to_an_interrupt(tmp_path):
    loop = LoopConfig(**{**EACH.__dict__, "checkpoint_every": 100, "replay_capacity": 60})
    config = TINY.__class__(**{**CONFIG.__dict__, "loop": loop})
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    dh.DHMBPO("Pendulum-v1", seeds=2, config=config).learn(160, out=whole)
    with pytest.raises(ZeroDivisionError):
        model = dh.DHMBPO("Pendulum-v1", seeds=2, config=config)
        model.learn(160, out=cut, callback=lambda progress: 1 // (progress.step < 120))
    with pytest.raises(dh.UserError, match="stopped inside an iteration"):
        model.learn(20)
    dh.DHMBPO.load(cut).resume(cut)
    same_end(whole, cut)


def test_a_new_goal_is_remembered_at_once(copy):
    with pytest.raises(ZeroDivisionError):
        dh.DHMBPO.load(copy).learn(60, out=copy, callback=lambda progress: 1 // 0)
    assert dh.DHMBPO.load(copy)._progress.goal == 160  # type: ignore[union-attr]


def test_a_run_is_not_given_what_it_did_not_have(copy):
    with pytest.raises(dh.UserError, match="trained without a reward"):
        dh.DHMBPO.load(copy, reward=lambda obs, act, next_obs: obs[..., 0])
    with pytest.raises(dh.UserError, match="was not loaded from"):
        dh.DHMBPO("Pendulum-v1", config=TINY).resume(copy)


def test_without_its_config_a_run_goes_on_too(copy):
    (copy / "config.json").unlink()
    assert dh.DHMBPO.load(copy).resume(copy, 120).num_timesteps == 120


def test_what_lies_in_the_way_of_an_agent_is_left_alone(run, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(dh.UserError, match="is not empty"):
        dh.DHMBPO.load(run).save(tmp_path)


def test_a_log_that_cannot_be_read_is_told(copy):
    (copy / "eval.csv").write_bytes(b"\xff" + (copy / "eval.csv").read_bytes()[1:])
    with pytest.raises(dh.UserError, match=r"eval\.csv is damaged"):
        dh.DHMBPO.load(copy).resume(copy, 120)
    assert dh.DHMBPO.load(copy).num_timesteps == 100


def test_a_disk_that_cannot_be_read_just_now_is_no_damage(copy, monkeypatch):
    read = Path.read_bytes

    def fail(path):
        if path.name == "state.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(dh.UserError, match=r"cannot be read: .*Input/output error"):
        dh.DHMBPO.load(copy)
    monkeypatch.undo()
    assert dh.DHMBPO.load(copy).num_timesteps == 100


def test_a_folder_is_never_gone_while_it_is_replaced(tmp_path, monkeypatch):
    folder = tmp_path / "10"
    durable.write_folder(folder, {"x": b"old"})
    rename = Path.rename

    def fail(path, target):
        if path.name == "10.partial":
            raise OSError(errno.ENOSPC, "full")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="full"):
        durable.write_folder(folder, {"x": b"new"})
    assert (folder / "x").read_bytes() == b"old"
    monkeypatch.undo()
    folder.rename(tmp_path / "10.before")  # as if the process had ended in between
    assert (durable.present(folder) / "x").read_bytes() == b"old"
    durable.write_folder(folder, {"x": b"new"})
    assert [path.name for path in tmp_path.iterdir()] == ["10"] and (folder / "x").read_bytes() == b"new"


def test_a_lock_is_no_link(copy, tmp_path):
    (copy / ".lock").unlink()
    (copy / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(dh.UserError, match="is a link"):
        dh.DHMBPO.load(copy).resume(copy, 120)
    assert not (tmp_path / "elsewhere").exists()


# -- the replay's pieces -----------------------------------------------------------------------------------


def filled(num_rows: int, capacity: int):
    """Two seeds' replays after so many rows, ten at a time; row number i has the reward i."""
    replay = jax.vmap(lambda _: empty(capacity, 2, 1, 3, 5))(np.arange(2))
    for begin in range(0, num_rows, 10):
        number = np.arange(begin, begin + 10, dtype=np.float32)
        rows = Transition(
            obs=jax.numpy.tile(number[:, None], (1, 2)),
            act=jax.numpy.asarray(number[:, None]),
            reward=jax.numpy.asarray(number),
            next_obs=jax.numpy.tile(number[:, None], (1, 2)),
            terminated=jax.numpy.zeros(10),
        )
        keys = jax.random.split(jax.random.key(begin), 2)
        replay = jax.vmap(lambda r, k, rows=rows: add(r, rows, k))(replay, keys)
    return replay


@pytest.mark.parametrize("steps", [[10, 20, 30], [30], [20, 60, 70], [40, 90]])
def test_rows_come_back_where_they_stood_even_behind_the_end_of_the_ring(tmp_path, steps):
    from doublehorizon.saved import _replay

    archived, capacity = Archived(), 40
    for stored in steps:
        rows = chunks.new_rows(filled(stored, capacity), archived, stored, 10)
        archived = chunks.append(tmp_path, rows, archived, stored)
    assert archived.rows == steps[-1]
    expected = filled(steps[-1], capacity)
    found = _replay(
        jax.eval_shape(lambda: expected), chunks.read(tmp_path, archived, min(steps[-1], capacity)), steps[-1]
    )
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(a, b)


def test_pieces_that_are_too_old_go(tmp_path):
    archived = Archived()
    for stored in range(10, 101, 10):
        archived = chunks.append(tmp_path, chunks.new_rows(filled(stored, 40), archived, stored, 10), archived, stored)
    chunks.forget(tmp_path, 100 - 40)
    assert len(list(tmp_path.iterdir())) == 4
    assert chunks.read(tmp_path, archived, 40)["reward"][0].tolist() == list(range(60, 100))
    with pytest.raises(chunks.DamageError, match="cannot be read"):
        chunks.read(tmp_path, archived, 50)
