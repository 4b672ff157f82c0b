"""Run folders that somebody has changed: one line about each, and nothing of the user's is lost."""

import json
import shutil
from pathlib import Path

import pytest

import doublehorizon as dh
from doublehorizon.cli import _status
from doublehorizon.experiments.jobs import Job, work
from worlds import TINY


@pytest.mark.parametrize(
    "content",
    [b"step,time,reward,seed\n0,0,abc,0\n", b"a,b\n1,2\n", b"step,time,reward,seed\n0,0,\xff\xfe,0\n"],
    ids=["no number", "another header", "no UTF-8"],
)
def test_one_bad_run_does_not_hide_the_others(copy, content, capsys):
    shutil.copytree(copy, copy.parent / "runs" / "good")
    shutil.copytree(copy, copy.parent / "runs" / "bad")
    (copy.parent / "runs" / "bad" / "eval.csv").write_bytes(content)
    assert _status(["list", str(copy.parent / "runs")]) == 0
    out = capsys.readouterr().out
    assert "is damaged" in out and "100 of 100" in out


def test_names_reach_the_terminal_as_plain_text(copy, capsys):
    about = json.loads((copy / "config.json").read_text())
    about["env"]["name"] = "[/foo]\x1b[2J"
    (copy / "config.json").write_text(json.dumps(about))
    assert _status(["list", str(copy)]) == 0
    out = capsys.readouterr().out
    assert "[/foo]" in out and "\x1b" not in out


def test_a_report_says_what_is_wrong_with_a_log(copy, capsys):
    path = copy / "progress.csv"
    path.write_text(path.read_text().replace("time/total_timesteps", "time/total"))
    assert _status(["report", str(copy)]) == 2
    assert "progress.csv is damaged" in capsys.readouterr().err


def test_a_report_embeds_no_file_from_elsewhere_and_no_name_blanks_it(copy, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret words")
    (copy / "video").mkdir()
    (copy / "video" / "seed0.mp4").symlink_to(secret)
    about = json.loads((copy / "config.json").read_text())
    about["env"]["name"] = "<!--<script>"
    (copy / "config.json").write_text(json.dumps(about))
    assert _status(["report", str(copy)]) == 0
    page = (copy / "report.html").read_text()
    assert "c2VjcmV0IHdvcmRz" not in page and "<!--<script>" not in page


def test_saving_removes_nothing_of_the_users(run, tmp_path):
    model = dh.DHMBPO.load(run)
    for name in ("agent.partial", "agent.before"):
        other = tmp_path / name
        other.mkdir()
        (other / "thesis.txt").write_text("years of work")
        with pytest.raises(dh.UserError, match=f"{name} is in the way"):
            model.save(tmp_path / "agent")
        assert (other / "thesis.txt").read_text() == "years of work"
        shutil.rmtree(other)
    (tmp_path / "agent.partial" / "checkpoints").mkdir(parents=True)  # as a save that was killed leaves it
    model.save(tmp_path / "agent")
    model.save(tmp_path / "agent")
    assert [path.name for path in tmp_path.iterdir()] == ["agent"]


def test_an_experiment_removes_no_run_that_has_results(copy: Path):
    shutil.rmtree(copy / "checkpoints")
    before = sorted(path.name for path in copy.iterdir())
    with pytest.raises(dh.UserError, match="holds a run without a checkpoint"):
        work(Job("Pendulum-v1", "dhmbpo", TINY, steps=80, seeds=2), copy)
    assert sorted(path.name for path in copy.iterdir()) == before
