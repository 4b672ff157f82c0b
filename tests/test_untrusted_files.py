"""Files that are not what they should be: pipes, archives that grow, arrays and JSON without end, bad names; and what a
run needs of memory and disk."""

import json
import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest

import doublehorizon as dh
from doublehorizon.acting.recorded_data import load_transitions
from doublehorizon.analysis.curves import read_curves
from doublehorizon.analysis.export import export_policy
from doublehorizon.analysis.replay_forward import read_rows
from doublehorizon.cli import _status
from doublehorizon.config_json import read_config
from doublehorizon.envs.make import describe, make
from doublehorizon.errors import RunError
from doublehorizon.experiments.launchers import write_files
from doublehorizon.run.run_reader import read_run

SPEC = describe(make("Pendulum-v1"))


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints/100/checkpoint.json",
        "checkpoints/100/state.safetensors",
        "config.json",
        "eval.csv",
        "policy/seed0.safetensors",
        "policy/returns.json",
    ],
)
def test_a_pipe_in_a_run_folder_is_not_waited_for(copy, name):
    (copy / name).unlink()
    os.mkfifo(copy / name)
    readers = {
        "config.json": lambda: read_run(copy),
        "eval.csv": lambda: read_curves(copy / "eval.csv"),
        "policy/seed0.safetensors": lambda: dh.load_policy(copy / name),
        "policy/returns.json": lambda: dh.load_policy(copy),
    }
    with pytest.raises(dh.UserError, match="it is not a regular file"):
        readers.get(name, lambda: dh.DHMBPO.load(copy))()


def test_a_pipe_among_the_logs_is_not_written_to(copy):
    model = dh.DHMBPO.load(copy)
    (copy / "progress.csv").unlink()
    os.mkfifo(copy / "progress.csv")
    with pytest.raises(dh.UserError, match=r"progress\.csv is no file"):
        model.resume(copy, 120)


def test_arrays_and_archives_from_a_pipe_or_without_end_are_refused(tmp_path):
    header = np.lib.format.magic(1, 0)
    text = "{'descr': '<f4', 'fortran_order': False, 'shape': (100000000000000, 3), }".ljust(117) + "\n"
    endless = header + len(text).to_bytes(2, "little") + text.encode()
    os.mkfifo(tmp_path / "pipe.npz")
    with zipfile.ZipFile(tmp_path / "endless.npz", "w") as archive:
        for name in ("obs", "act", "reward", "next_obs", "terminated"):
            archive.writestr(f"{name}.npy", endless)
    for name in ("pipe.npz", "endless.npz"):
        with pytest.raises(dh.UserError, match=r"\.npz cannot be read"):
            load_transitions(tmp_path / name, SPEC, 5)
        with pytest.raises(dh.UserError, match="holds no transitions that can be read"):
            read_rows(tmp_path / name, 100)


def packed(path, names, content: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, content)


def test_an_agent_that_would_fill_the_disk_or_is_locked_is_refused(tmp_path):
    packed(tmp_path / "bomb.zip", ["checkpoints/1/state.safetensors"], bytes(100_000_000))
    packed(tmp_path / "locked.zip", ["checkpoints/1/state.safetensors"], b"secret")
    content = bytearray((tmp_path / "locked.zip").read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the flag that says it is encrypted
        content[content.index(signature) + offset] |= 1
    (tmp_path / "locked.zip").write_bytes(content)
    (tmp_path / "short.zip").write_bytes(content[:-30])
    for name, words in (("bomb", "100000000 unpacked"), ("locked", "encrypted"), ("short", "not a zip file")):
        with pytest.raises(dh.UserError, match=f"{name}.zip cannot be read as an agent: .*{words}"):
            dh.DHMBPO.load(tmp_path / f"{name}.zip")


def test_json_that_is_nested_without_end_is_one_line(tmp_path, copy, capsys):
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with pytest.raises(dh.UserError, match="cannot be read as a config: it is nested too deeply"):
        read_config(path)
    assert _status(["train", "Pendulum-v1", "--config", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (copy / "policy" / "returns.json").write_text("[" * 100_000)
    with pytest.raises(dh.UserError, match="is damaged"):
        dh.load_policy(copy)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "checkpoints/../../outside"])
def test_a_node_cannot_write_outside_of_its_run(tmp_path, name):
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "outside").write_text("keep me")
    for changed, gone in (({name: b"new"}, set()), ({}, {name})):
        with pytest.raises(RunError, match="not inside a run folder"):
            write_files(folder, changed, gone)
    assert (tmp_path / "outside").read_text() == "keep me"


def test_a_file_name_is_no_code(run, tmp_path):
    name = 'p"); print("gotcha"); ("""""" \'.npz'
    export_policy(dh.load_policy(run), tmp_path / name)
    runner = (tmp_path / name).with_suffix(".py")
    code = f"import runpy; ns = runpy.run_path({str(runner)!r}); print(ns['Policy']()([1.0, 0.0, 0.0]).shape)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("(1,)\n", "")


def test_what_a_run_needs_is_known_before_it_starts(tmp_path, monkeypatch, said):
    from doublehorizon.run import resources

    config = dh.presets.dhmbpo
    spec = describe(make("Pendulum-v1"))
    found = resources.needs(config, spec, 32, 10**6)
    row = 32 * 4 * (2 * 3 + 1 + 2 + 8)  # two observations, an action, reward, terminated, a weight for each member
    assert row <= found.row <= row + 32  # and a number for every fifth row
    assert found.replay == pytest.approx(10**6 * (row + 32 * 4 / 5), rel=1e-6)
    assert found.disk > found.replay and str(found).startswith(f"up to {found.replay / 1e9:.3g} GB of memory")
    monkeypatch.setattr(resources, "free_memory", lambda devices: 1e6)
    model = dh.DHMBPO("Pendulum-v1", config=config)
    with pytest.raises(dh.UserError, match=r"need .* of memory, but 1 MB are free .*--loop.replay-capacity 7\d\d\d"):
        model.learn(10**6)
    assert model.progress is None
    monkeypatch.undo()
    monkeypatch.setattr("shutil.disk_usage", lambda path: os.statvfs_result(range(10)) and type("U", (), {"free": 0})())
    with pytest.raises(dh.UserError, match=r"run may need .* of disk, but 0 kB are free"):
        dh.DHMBPO("Pendulum-v1", config=config).learn(1000, out=tmp_path / "run")


def test_a_goal_that_nobody_could_reach_takes_no_memory(copy, monkeypatch):
    from doublehorizon.atomic_files import digest
    from doublehorizon.run import checkpoint_writer, resources

    for path in (copy / "checkpoints").glob("*/checkpoint.json"):
        about = json.loads(path.read_text())["checkpoint"] | {"goal": 10**8}
        path.write_text(json.dumps({"digest": digest(checkpoint_writer.canonical(about)), "checkpoint": about}))
    monkeypatch.setattr(resources, "free_memory", lambda devices: 5e7)
    with pytest.raises(dh.UserError, match="transitions of this run need"):
        dh.DHMBPO.load(copy)


def test_a_run_that_gets_no_further_says_so(copy, said):
    step = max(int(path.name) for path in (copy / "checkpoints").iterdir())

    def interrupt(progress):
        raise KeyboardInterrupt

    for attempt in range(5):
        with pytest.raises(KeyboardInterrupt):
            dh.DHMBPO.load(copy).resume(copy, step + 40, callback=interrupt)
        told = [line for line in said if "got no further" in line]
        assert len(told) == max(0, attempt - 2)
    assert f"was started 5 times at step {step}" in told[-1]
    dh.DHMBPO.load(copy).resume(copy, step + 40)
    assert json.loads((copy / "starts.json").read_text()) == {"step": step, "starts": 6}
