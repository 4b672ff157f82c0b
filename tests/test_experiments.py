"""The paper's experiments: their jobs, how they go on after an interruption, on this machine and on a cluster."""

import io
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cluster
import doublehorizon as dh
from doublehorizon.analysis import experiment_results
from doublehorizon.analysis.curves import read_curves
from doublehorizon.cli import _status
from doublehorizon.experiments.experiment_view import ExperimentView
from doublehorizon.experiments.jobs import Job, is_done, read_job
from doublehorizon.experiments.launchers import Resources, decided, read_files, run_locally, write_files
from doublehorizon.experiments.paper_experiments import EXPERIMENTS, jobs_of, paper_experiment
from doublehorizon.presets import PRESETS
from kept import without_times
from test_cli import TINY_OPTIONS
from worlds import TINY

SMALL = [
    *TINY_OPTIONS.split(),
    "--policy.ring-capacity",
    "400",
    "--tasks",
    "Pendulum-v1",
    "--seeds",
    "1",
    "--quiet",
    "--device",
    "cpu",
]


def test_every_experiment_makes_sense_for_every_preset():
    for name, chosen in EXPERIMENTS.items():
        for base in ("dhmbpo", "paper", "light", "quick"):
            jobs = jobs_of(chosen, PRESETS[base], ("paper/Hopper", "dmc/cheetah-run"), steps=1, seeds=1)
            assert len({job.name for job in jobs}) == 2 * len(chosen.variants), name
            assert [read_job(job.text()) for job in jobs] == jobs
    values = {name: list(chosen.variants) for name, chosen in EXPERIMENTS.items()}
    assert values["tr-horizon"] == [f"training-{t}" for t in (5, 1, 3, 7, 9)]
    assert values["no-tr-utd"] == [f"updates_per_step-{n}" for n in (1, 2, 4, 8, 16)]
    with pytest.raises(dh.UserError, match="Did you mean 'ablation'"):
        paper_experiment("ablatoin")


def job(**values) -> Job:
    return Job("Pendulum-v1", "dhmbpo", replace(TINY), steps=80, seeds=2, **values)


def test_published_curves_stand_beside_ours(tmp_path, capsys):
    jobs = [job(), replace(job(), variant="no-dr")]
    for k, one in enumerate(jobs):
        folder = tmp_path / one.name
        folder.mkdir(parents=True)
        tests = [(0, 1.0 + k, 0), (40, 3.0 + k, 0), (0, 2.0 + k, 1), (40, 5.0 + k, 1)]
        lines = [f"{step},{seed},{value},{seed}" for step, value, seed in tests]
        (folder / "eval.csv").write_text("step,time,reward,seed\n" + "\n".join(lines) + "\n")
        (folder / "progress.csv").write_text("time/time_elapsed\n120.0\n")
    (tmp_path / "authors" / "roll" / "no-roll").mkdir(parents=True)
    theirs = "step,time,reward,seed\n0,0,7,0\n0,0,9,1\n38,0,10,0\n38,0,20,1\n50,0,99,0\n50,0,99,1\n0,0,9,2\n"
    (tmp_path / "authors" / "roll" / "no-roll" / "Pendulum-v1.csv").write_text(theirs)
    found = experiment_results.gather(jobs, tmp_path, EXPERIMENTS["ablation"], tmp_path / "authors")
    dhmbpo, no_dr = found.lines
    assert (dhmbpo.mean, dhmbpo.step, dhmbpo.seeds, dhmbpo.minutes, dhmbpo.published) == (4.0, 40, 2, 2.0, None)
    assert no_dr.published == 15.0 and no_dr.mean == 5.0  # theirs at 38, before ours; one of them ended at 0
    experiment_results.draw(found, "title", tmp_path / "curves.png")
    experiment_results.write_table(found, tmp_path / "results.csv")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert (
        "no-dr" in experiment_results.table(found)
        and json.loads(experiment_results.as_json(found))["runs"][1]["published"] == 15.0
    )
    assert found.scores == {}  # one task: nothing to aggregate
    two = [*jobs, *(replace(one, task="Other") for one in jobs)]
    for one in two[2:]:
        (tmp_path / one.name).parent.mkdir(exist_ok=True)
        same = read_files(tmp_path / one.name.replace("Other", "Pendulum-v1"), {})
        write_files(tmp_path / one.name, same, set())
    both = experiment_results.gather(two, tmp_path, EXPERIMENTS["ablation"], None)
    assert both.scores["dhmbpo"]["mean"].value == pytest.approx(1.0) and both.scores["no-dr"]["IQM"].value == 1.25


def test_a_folder_is_mirrored_without_what_is_being_written(tmp_path):
    there, here, known = tmp_path / "there", tmp_path / "here", {}
    (there / "checkpoints" / "20").mkdir(parents=True)
    (there / "checkpoints" / "40.partial").mkdir()
    for name in ("eval.csv", ".lock", "checkpoints/20/state", "checkpoints/40.partial/state", "x.partial"):
        (there / name).write_text(name)
    first = read_files(there, known)
    assert set(first) == {"eval.csv", "checkpoints/20/state"}
    write_files(here, first, set())
    (here / "report.html").write_text("somebody's own")
    (there / "eval.csv").write_text("longer than before")
    (there / "checkpoints" / "20" / "state").unlink()
    before = set(known)
    second = read_files(there, known)
    assert set(second) == {"eval.csv"} and before - set(known) == {"checkpoints/20/state"}
    assert read_files(there, known) == {}
    write_files(here, second, before - set(known))
    assert (here / "eval.csv").read_text() == "longer than before"
    assert not (here / "checkpoints" / "20").exists() and (here / "report.html").exists()


def test_a_run_whose_last_test_is_missing_is_not_done(tmp_path):
    one = job()
    dh.DHMBPO(one.task, seeds=2, config=one.config).learn(80, out=tmp_path)
    assert is_done(one, tmp_path) and not is_done(replace(one, steps=100), tmp_path)
    lines = (tmp_path / "eval.csv").read_text().splitlines(keepends=True)
    (tmp_path / "eval.csv").write_text("".join(line for line in lines if not line.startswith("80,")))
    assert not is_done(one, tmp_path)


def test_runs_ask_a_cluster_for_what_one_of_its_nodes_has():
    def node(cores: float, gpus: float = 0, alive: bool = True) -> dict:
        return {"Alive": alive, "Resources": {"CPU": float(cores), "GPU": float(gpus)}}

    nodes = [node(64), node(4, 1), node(128, 8, alive=False)]
    assert decided(Resources(), 8, nodes) == Resources(1.0, 4.0)  # the GPU's node has 4 cores only
    assert decided(Resources(gpus=0.0), 8, nodes) == Resources(0.0, 8.0)
    assert decided(Resources(cores=2.0), 8, nodes) == Resources(1.0, 2.0)
    with pytest.raises(dh.UserError, match=r"asks for 8 core\(s\) and 1 GPU\(s\), but no node"):
        decided(Resources(cores=8.0), 8, nodes)


def test_mistakes_are_told_in_one_line(capsys, tmp_path):
    for words, values in (
        (["ablatoin"], "Did you mean 'ablation'"),
        (["ablation", "--on", "moon"], "--on is 'moon'"),
        (["ablation", "--variants", "mpbo"], "has no variant 'mpbo'"),
        (["ablation", "--seeds", "0"], "--seeds is 0"),
        (["ablation", "--tasks", "Pendulum-v1", "Pendulum-v1"], "two runs would be in the folder Pendulum-v1/dhmbpo"),
    ):
        assert _status(["experiment", *words, "--out", str(tmp_path)]) == 2
        assert values in capsys.readouterr().err


def experiment(folder: Path, name: str, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "doublehorizon.cli", "experiment", name, "--out", str(folder), *SMALL, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen, status: int = 0) -> str:
    out, err = process.communicate(timeout=900)
    assert process.returncode == status, err
    return out + err


@pytest.mark.slow
def test_an_experiment_that_is_stopped_goes_on_where_it_was(tmp_path, capsys):
    words = ["--variants", "dhmbpo", "--steps", "400", "--loop.checkpoint-every", "1"]
    process = experiment(tmp_path / "parts", "ablation", *words)
    run = tmp_path / "parts" / "Pendulum-v1" / "dhmbpo"
    deadline = time.monotonic() + 300
    while not (run / "progress.csv").exists() or len((run / "progress.csv").read_text().splitlines()) < 4:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    ended(process, 143)
    assert not is_done(read_job_of(run, 400), run)
    (line,) = json.loads(ended(experiment(tmp_path / "parts", "ablation", *words, "--json")))["runs"]
    assert line["step"] == 400 and (tmp_path / "parts" / "curves.png").exists()
    ended(experiment(tmp_path / "whole", "ablation", *words))
    for name in ("eval.csv", "progress.csv"):  # a test may have been due where it was stopped
        assert without_times(run / name) == without_times(tmp_path / "whole" / "Pendulum-v1" / "dhmbpo" / name)
    assert _status(["experiment", "ablation", "--out", str(tmp_path / "parts"), *SMALL, *words, "--seed", "7"]) == 2
    assert "other seeds or another config" in capsys.readouterr().err


def read_job_of(run: Path, steps: int) -> Job:
    about = json.loads((run / "config.json").read_text())
    values = {"task": "Pendulum-v1", "variant": "dhmbpo", "steps": steps, "seeds": 1, "config": about["config"]}
    return read_job(json.dumps(values))


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    words = ["--variants", "dhmbpo", "--steps", "80", "--tasks", "NoSuchTask-v1", "Pendulum-v1"]
    said = ended(experiment(tmp_path, "ablation", *words), 1)
    assert "1 of 2 run(s) failed" in said and "NoSuchTask" in said
    alone = ["--variants", "dhmbpo", "--steps", "20", "--tasks", "Pendulum-v1"]
    assert "begins with 40 random steps" in ended(experiment(tmp_path / "short", "ablation", *alone), 1)
    assert len(read_curves(tmp_path / "Pendulum-v1" / "dhmbpo" / "eval.csv")) == 1


def test_the_board_shows_what_runs_have_reached(tmp_path):
    from rich.console import Console

    one = job()
    (tmp_path / one.name).mkdir(parents=True)
    (tmp_path / one.name / "eval.csv").write_text("step,time,reward,seed\n0,0,-9,0\n0,0,-7,1\n40,1,3,0\n40,1,5,1\n")
    (tmp_path / one.name / "progress.csv").write_text("time/total_timesteps\n60\n")
    console = Console(record=True, width=120, force_terminal=False, file=io.StringIO())
    with ExperimentView([one], tmp_path, console=console) as view:
        view.update(one.name, "running", "on node 3")
        console.print(view)
    shown = console.export_text()
    assert "Pendulum-v1/dhmbpo: running  step 60 of 80  on node 3" in shown and "60 of 80" in shown
    assert view.rows[one.name].returns == (-8.0, 4.0)


def test_a_board_without_a_terminal_tells_of_each_test_and_is_not_silent_for_long(tmp_path, monkeypatch):
    from rich.console import Console

    now = [1000.0]
    monkeypatch.setattr("doublehorizon.experiments.experiment_view.time.monotonic", lambda: now[0])
    one, console = job(), Console(record=True, width=120, force_terminal=False, file=io.StringIO())
    (tmp_path / one.name).mkdir(parents=True)

    def lines(after: float, tests: str = "", step: int = 0) -> list[str]:
        now[0] += after
        if tests:
            (tmp_path / one.name / "eval.csv").write_text(f"step,time,reward,seed\n{tests}")
            (tmp_path / one.name / "progress.csv").write_text(f"time/total_timesteps\n{step}\n")
        view.refresh()
        return console.export_text().splitlines()

    with ExperimentView([one], tmp_path, console=console) as view:
        view.update(one.name, "running")
        assert lines(5) == ["Pendulum-v1/dhmbpo: running  step 0 of 80"]
        assert lines(5, "0,0,-9,0\n", 20) == [
            "Pendulum-v1/dhmbpo: running  step 20 of 80  test return -9  0:00:30 left"
        ]
        assert lines(5, "0,0,-9,0\n", 40) == []  # further, but nothing new to tell
        assert lines(26)[0].startswith("Pendulum-v1/dhmbpo: running  step 40 of 80  test return -9")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_tiny_run_of_every_experiment(name, tmp_path):
    out = ended(experiment(tmp_path, name, "--steps", "60", "--json"))
    lines = json.loads(out)["runs"]
    assert [line["variant"] for line in lines] == list(EXPERIMENTS[name].variants)
    assert all(np.isfinite(line["mean"]) and line["step"] == 60 for line in lines)


@pytest.mark.slow
def test_a_cluster_that_loses_a_node_brings_the_same_runs(tmp_path):
    script = Path(__file__).parent / "cluster.py"
    command = [sys.executable, str(script), str(tmp_path / "cluster")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout.splitlines()[-1])
    assert values["problems"] == {} and len(values["losses"]) == 1
    assert set(values["states"].values()) == {"done"}
    with ExperimentView(cluster.JOBS, tmp_path / "alone", quiet=True) as view:
        assert run_locally(cluster.JOBS, tmp_path / "alone", view) == {}
    for one in cluster.JOBS:
        for name in ("eval.csv", "progress.csv"):
            pair = [without_times(tmp_path / where / one.name / name) for where in ("cluster", "alone")]
            assert pair[0] == pair[1], name
