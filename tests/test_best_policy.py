"""The policy of a run's best test: kept beside the last ones, tested, filmed and exported."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import doublehorizon as dh
from doublehorizon.analysis.video import record_video
from doublehorizon.run.run_reader import read_rows, read_run
from test_people import mistake, said
from worlds import TINY


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("best") / "run"
    dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY).learn(80, out=folder)
    return folder


def test_the_best_of_all_tests_is_kept_and_can_be_taken_away(run, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    kept = copy / "policy" / "best.safetensors"
    rows = [row for row in read_rows(run / "eval.csv") if int(row["step"]) >= 40]  # the first 40 steps are random
    top = max(rows, key=lambda row: float(row["reward"]))
    record = json.loads((copy / "policy" / "best.json").read_text())
    assert (record["step"], record["seed"]) == (int(top["step"]), int(top["seed"]))
    assert record["value"] == pytest.approx(float(top["reward"]), rel=1e-6)
    at_end = {row["seed"]: float(row["reward"]) for row in rows if row["step"] == "80"}
    worse = min(at_end, key=lambda seed: at_end[seed])  # not the one that is taken by default
    last = copy / "policy" / f"seed{worse}.safetensors"
    shutil.copy(last, kept)
    obs = np.ones(3, np.float32)
    np.testing.assert_array_equal(dh.load_policy(copy, best=True).predict(obs)[0], dh.load_policy(last).predict(obs)[0])
    for seed in ("0", "1"):  # the best one has the episodes of the first seed
        for name in ("seed0", "best"):
            shutil.copy(run / "policy" / f"seed{seed}.safetensors", copy / "policy" / f"{name}.safetensors")
        both = [
            json.loads(said(capsys, "eval", str(copy), "--episodes", "1", *words, "--json"))["returns"]
            for words in (("--best",), ("--seeds", "0"))
        ]
        assert both[0] == {"best": both[1]["0"]}
    shutil.copy(run / "policy" / "seed0.safetensors", copy / "policy" / "seed0.safetensors")
    shutil.copy(last, kept)
    assert said(capsys, "eval", str(copy), "--episodes", "1", "--best").startswith("best: ")
    said(capsys, "export", str(copy), str(tmp_path / "best.npz"), "--best")
    said(capsys, "export", str(copy), str(tmp_path / "last.npz"), "--seed", worse)
    one, other = (np.load(tmp_path / f"{name}.npz") for name in ("best", "last"))
    assert all(np.array_equal(one[name], other[name]) for name in one.files)
    words = "--best is one policy of all seeds"
    assert words in mistake(capsys, "eval", str(copy), "--best", "--seeds", "1")
    assert words in mistake(capsys, "export", str(copy), str(tmp_path / "p.npz"), "--best", "--seed", "1")
    with pytest.raises(dh.UserError, match="last policies alone"):
        dh.DHMBPO.load(copy).save(tmp_path / "agent.zip")
        dh.load_policy(tmp_path / "agent.zip", best=True)
    kept.unlink()
    assert "holds no policy/best.safetensors" in mistake(capsys, "eval", str(copy), "--best")


def test_the_best_policy_is_filmed_under_its_name(run, tmp_path, capsys):
    words = said(capsys, "video", str(run), "--best", "--out", str(tmp_path))
    assert words.startswith(f"{tmp_path / 'best.mp4'}  (return ") and (tmp_path / "best.mp4").stat().st_size > 1000
    total = record_video(read_run(run), 0, dh.load_policy(run, best=True), tmp_path / "again.mp4")
    assert f"(return {total:.1f})" in words  # seed 0's first episode
