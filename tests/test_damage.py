"""What is damaged is recognised; what goes wrong with the disk harms nothing; a file can do nothing."""

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import doublehorizon as dh
from doublehorizon import atomic_files
from doublehorizon.analysis.curves import task_of
from doublehorizon.cli.resume import _is_deterministic
from doublehorizon.errors import RunError
from doublehorizon.run import checkpoint_reader, checkpoint_writer
from doublehorizon.run.checkpoint_reader import read_newest
from kept import differences
from worlds import TINY


def test_a_file_is_never_imported_from(copy):
    for checkpoint in (copy / "checkpoints").iterdir():
        path = checkpoint / "checkpoint.json"
        about = json.loads(path.read_text())["checkpoint"]
        about["env"] |= {"name": "os:system", "registered": True}
        sealed = {"digest": atomic_files.digest(checkpoint_writer.canonical(about)), "checkpoint": about}
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
    with atomic_files.locked(copy), pytest.raises(dh.UserError, match="another process is training"):
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
    assert not differences(run, copy)


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
    path.write_text(
        json.dumps({"digest": atomic_files.digest(checkpoint_writer.canonical(about)), "checkpoint": about})
    )
    with pytest.raises(dh.UserError, match=r"written by doublehorizon 9\.1 in the format 'doublehorizon-checkpoint-9'"):
        dh.DHMBPO.load(copy)


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
        path.write_text(
            json.dumps({"digest": atomic_files.digest(checkpoint_writer.canonical(about)), "checkpoint": about})
        )
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

    monkeypatch.setattr(atomic_files.os, "replace", refuse)


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
        copy.rename(copy.with_name("elsewhere"))  # at once, while checkpoints are being written

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
    read = checkpoint_reader.read_file

    def fail(path, *most):
        if path.name == "state.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path, *most)

    monkeypatch.setattr(checkpoint_reader, "read_file", fail)
    with pytest.raises(dh.UserError, match=r"cannot be read: .*Input/output error"):
        dh.DHMBPO.load(copy)
    monkeypatch.undo()
    assert dh.DHMBPO.load(copy).num_timesteps == 100


def test_a_folder_is_never_gone_while_it_is_replaced(tmp_path, monkeypatch):
    folder = tmp_path / "10"
    atomic_files.write_folder(folder, {"x": b"old"})
    rename = Path.rename

    def fail(path, target):
        if path.name == "10.partial":
            raise OSError(errno.ENOSPC, "full")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="full"):
        atomic_files.write_folder(folder, {"x": b"new"})
    assert (folder / "x").read_bytes() == b"old"
    monkeypatch.undo()
    folder.rename(tmp_path / "10.before")  # as if the process had ended in between
    assert (atomic_files.existing_folder(folder) / "x").read_bytes() == b"old"
    atomic_files.write_folder(folder, {"x": b"new"})
    assert [path.name for path in tmp_path.iterdir()] == ["10"] and (folder / "x").read_bytes() == b"new"


def test_a_lock_is_no_link(copy, tmp_path):
    (copy / ".lock").unlink()
    (copy / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(dh.UserError, match="is a link"):
        dh.DHMBPO.load(copy).resume(copy, 120)
    assert not (tmp_path / "elsewhere").exists()
