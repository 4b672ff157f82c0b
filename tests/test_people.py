"""What people look at and take away: tests, plots, reports, videos, exports, lists, trackers, the live view."""

import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import av
import numpy as np
import onnxruntime
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import doublehorizon as dh
from doublehorizon.analysis.aggregate import aggregate, iqm, mean, median, profile
from doublehorizon.analysis.export import export_policy
from doublehorizon.analysis.report import write_report
from doublehorizon.analysis.video import record_video
from doublehorizon.cli import _status
from doublehorizon.envs.make import describe, make
from doublehorizon.envs.registry import GROUPS
from doublehorizon.run.run_reader import NO_GAIN, no_gain, read_rows, read_run
from doublehorizon.training.live_view import View, sparkline, with_spread
from worlds import TINY


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("people") / "run"
    board = dh.trackers.TensorBoard(folder / "tensorboard")
    dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY).learn(80, out=folder, trackers=[board])
    board.close()
    return folder


def said(capsys, *words: str) -> str:
    assert _status(list(words)) == 0
    return capsys.readouterr().out


def mistake(capsys, *words: str) -> str:
    assert _status(list(words)) == 2
    return capsys.readouterr().err


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n")


def test_eval_repeats_itself_and_other_episodes_differ(run, capsys):
    first = json.loads(said(capsys, "eval", str(run), "--episodes", "2", "--json"))["returns"]
    again = json.loads(said(capsys, "eval", str(run), "--episodes", "1", "--first", "1", "--json"))["returns"]
    assert set(first) == {"0", "1"} and first["0"][1] == again["0"][0] != first["0"][0]
    words = said(capsys, "eval", str(run), "--episodes", "2", "--seeds", "1")
    assert words.startswith("seed 1: ") and " ± " in words
    assert "has no seed 7" in mistake(capsys, "eval", str(run), "--seeds", "7")
    assert "obs_size 3" in mistake(capsys, "eval", str(run), "--env", "InvertedPendulum-v5")
    assert "is no run folder" in mistake(capsys, "eval", str(run / "policy"))


def test_an_onnx_file_gives_the_actions_of_predict(run, tmp_path):
    policy = dh.load_policy(run)
    (path,) = export_policy(policy, tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(path)
    obs = np.random.default_rng(0).normal(size=(50, 3), scale=3.0).astype(np.float32)
    (actions,) = session.run(None, {"observation": obs})
    np.testing.assert_allclose(actions, policy.predict(obs)[0], atol=1e-5)
    assert np.abs(actions).max() <= 2.0 + 1e-5  # Pendulum's own units


def test_a_numpy_file_comes_with_the_lines_that_run_it(run, tmp_path):
    policy = dh.load_policy(run)
    arrays, runner = export_policy(policy, tmp_path / "policy.npz")
    assert len(runner.read_text().splitlines()) <= 30
    spec = importlib.util.spec_from_file_location("exported", runner)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    obs = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    loaded = module.Policy(arrays)
    np.testing.assert_allclose(loaded(obs), policy.predict(obs)[0], atol=1e-6)
    np.testing.assert_allclose(loaded(obs[0]), policy.predict(obs[0])[0], atol=1e-6)


def test_export_names_its_files_and_refuses_other_formats(run, tmp_path, capsys):
    assert said(capsys, "export", str(run), str(tmp_path / "p.npz"), "--seed", "1").splitlines() == [
        str(tmp_path / "p.npz"),
        str(tmp_path / "p.py"),
    ]
    assert "end it in .onnx or .npz" in mistake(capsys, "export", str(run), str(tmp_path / "p.pt"))


def test_a_video_has_every_step_at_real_speed(run, tmp_path):
    found = read_run(run)
    total = record_video(found, 0, found.policies([0])[0], tmp_path / "seed0.mp4")
    with av.open(str(tmp_path / "seed0.mp4")) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        assert float(stream.average_rate) == 30.0  # Pendulum's
    assert len(frames) == 200 and -2000 < total < 0
    assert frames[0].std() > 10 and not np.array_equal(frames[0], frames[50])  # a picture, and it moves


def test_aggregates_by_hand():
    scores = {"a": np.array([0.0, 1.0, 2.0, 3.0]), "b": np.array([4.0, 5.0, 6.0, 7.0])}
    assert iqm(scores) == pytest.approx(3.5)  # the mean of 2, 3, 4, 5
    assert median(scores) == mean(scores) == 3.5
    skewed = {"a": np.array([0.0] * 6 + [100.0, 100.0]), "b": np.zeros(8), "c": np.ones(8)}
    assert iqm(skewed) == pytest.approx(4 / 12)  # of 24 sorted values the middle 12: eight 0, four 1
    assert median(skewed) == 1.0 and mean(skewed) == pytest.approx(26 / 3)
    found = aggregate(scores)
    assert found["mean"].low < 3.5 < found["mean"].high
    same = aggregate({"a": np.full(4, 2.0), "b": np.full(4, 4.0)})["mean"]
    assert (same.low, same.value, same.high) == (3.0, 3.0, 3.0)  # runs are drawn within tasks, not across
    share, low, high = profile(scores, np.array([-1.0, 2.5, 8.0]))
    np.testing.assert_allclose(share, [1.0, 0.625, 0.0])
    assert (low <= share).all() and (share <= high).all()


def test_plot_draws_runs_and_references_of_several_tasks(run, tmp_path, capsys):
    for task in ("One", "Two"):
        other = tmp_path / "runs" / task
        shutil.copytree(run, other)
        about = json.loads((other / "config.json").read_text())
        about["env"]["name"] = f"paper/{task}"
        (other / "config.json").write_text(json.dumps(about))
        (tmp_path / "published").mkdir(exist_ok=True)
        shutil.copy(run / "eval.csv", tmp_path / "published" / f"{task}.csv")
    words = ["plot", f"ours={tmp_path / 'runs'}", "--reference", str(tmp_path / "published")]
    figure, table = tmp_path / "a.svg", tmp_path / "a.csv"
    found = json.loads(said(capsys, *words, "--out", str(figure), "--csv", str(table), "--json"))
    assert found["over_tasks"]["ours"]["IQM"] == found["over_tasks"]["published"]["IQM"]
    assert set(found["last"]) == {"One", "Two"} and found["last"]["One"]["ours"]["step"] == 80
    assert "<svg" in figure.read_text()
    rows = read_rows(table)
    assert {(row["task"], row["label"]) for row in rows} == {
        (task, label) for task in ("One", "Two") for label in ("ours", "published")
    }
    assert all(float(row["low"]) <= float(row["mean"]) <= float(row["high"]) for row in rows)
    assert said(capsys, "plot", str(run), "--x", "time", "--out", str(tmp_path / "b.png")).strip().endswith("b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    # a method, and its own reference, that one task alone has: neither counts over tasks
    part = [*words[:2], f"part={tmp_path / 'runs' / 'One'}", *words[2:], f"part={tmp_path / 'published'}"]
    found = json.loads(said(capsys, *part, "--out", str(figure), "--json"))
    assert set(found["last"]["One"]) == {"ours", "part", "part, reference", "published"}
    assert set(found["last"]["Two"]) == set(found["over_tasks"]) == {"ours", "published"}
    alone = json.loads(said(capsys, *words[:2], "--out", str(figure), "--json"))
    assert set(alone["last"]) == {"One", "Two"} and alone["over_tasks"] == {}  # there is nothing to measure it by
    assert "holds no run" in mistake(capsys, "plot", str(tmp_path / "published"))
    assert "labels of their own" in mistake(capsys, "plot", str(run), str(run))
    assert "seed 0 is in two of the runs" in mistake(capsys, "plot", f"a={run}", f"a={run}")
    assert ".png, .svg or .pdf" in mistake(capsys, "plot", str(run), "--out", str(tmp_path / "c.xyz"))


def test_plot_takes_more_seeds_of_a_method_together_and_draws_a_reference_beside_it(run, tmp_path, capsys):
    more = tmp_path / "more"
    shutil.copytree(run, more)
    rows = read_rows(run / "eval.csv")
    later = [row | {"seed": str(int(row["seed"]) + 100), "reward": str(float(row["reward"]) + 2.0)} for row in rows]
    write_rows(more / "eval.csv", later)
    task = json.loads((run / "config.json").read_text())["env"]["name"].rsplit("/", 1)[-1]
    (tmp_path / "published").mkdir()
    write_rows(tmp_path / "published" / f"{task}.csv", later)
    words = ["plot", f"ours={run}", f"ours={more}", "--reference", f"ours={tmp_path / 'published'}"]
    found = json.loads(said(capsys, *words, "--out", str(tmp_path / "a.svg"), "--json"))["last"][task]
    assert set(found) == {"ours", "ours, reference"}
    np.testing.assert_allclose(found["ours"]["value"] + 1.0, found["ours, reference"]["value"])  # half of its seeds
    # seeds that went on for longer: all curves end where the last step of all seeds is, the reference's too
    write_rows(more / "eval.csv", [*later, *(row | {"step": "160"} for row in later if row["step"] == "80")])
    write_rows(tmp_path / "published" / f"{task}.csv", read_rows(more / "eval.csv"))
    found = json.loads(said(capsys, *words, "--out", str(tmp_path / "a.svg"), "--json"))["last"][task]
    assert found["ours"]["step"] == found["ours, reference"]["step"] == 80
    several = ["compare", str(run), str(more), "--reference", str(tmp_path / "published"), "--steps", "80"]
    both = json.loads(said(capsys, *several, "--json"))
    assert len(both["ours"]) == 4 and both["difference"] == pytest.approx(-1.0)
    assert "in two of the runs" in mistake(capsys, "compare", str(run), str(run), "--reference", str(run))
    assert "several tasks" in mistake(capsys, "compare", str(run), str(tmp_path), "--reference", str(run))
    assert "0 runs were given and a reference" in mistake(capsys, "compare", "--reference", str(run))
    assert "1 runs were given, but two are needed" in mistake(capsys, "compare", str(run))
    write_rows(more / "eval.csv", [row | {"step": "7"} for row in later if row["step"] == "80"])
    assert "at no step that all have" in mistake(capsys, *words, "--out", str(tmp_path / "a.svg"))
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn.count("stroke-dasharray") == 2  # its line, and that of the legend


def test_a_report_holds_what_it_shows_and_nothing_can_break_out_of_it(run, tmp_path):
    about = json.loads((run / "config.json").read_text())
    nasty = tmp_path / "run"
    shutil.copytree(run, nasty)
    about["env"]["name"] = "</script><script>alert(1)</script>"
    (nasty / "config.json").write_text(json.dumps(about))
    write_report([run, nasty], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "</script><script>alert" not in page and not re.search(r"(src|href)=\"http", page)
    (content,) = re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)
    data = json.loads(content)
    assert len(data["runs"]) == 2 and data["finals"][0]["seeds"] == 2
    assert [point[0] for point in data["tasks"][0]["curves"][0]["points"]] == [0, 40, 80]
    assert {phase["name"] for phase in data["runs"][0]["phases"]} >= {"collecting", "fitting the model"}


@pytest.mark.slow
def test_a_browser_draws_the_report_without_complaint(run, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert browser, "this test needs Chromium (Debian: chromium)"
    write_report([run], tmp_path / "report.html")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    page = (tmp_path / "report.html").as_uri()
    done = subprocess.run([*command, "--dump-dom", page], capture_output=True, text=True, timeout=120)
    curves = re.findall(r'<path class="curve" d="M([^"]+)"', done.stdout)
    assert len(curves) >= 8 and all("NaN" not in curve for curve in curves)
    assert re.search(r"<td>Pendulum-v1</td>", done.stdout)
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_lists_of_tasks_and_runs(run, capsys):
    words = said(capsys, "list")
    assert "paper/Hopper" in words and "dmc/cheetah-run" in words and "500,000" in words
    (found,) = json.loads(said(capsys, "list", str(run.parent), "--json"))
    assert found["env"] == "Pendulum-v1" and found["step"] == found["steps"] == 80 and found["state"] == "done"
    assert "no folder" in mistake(capsys, "list", "nowhere")


@pytest.mark.parametrize("entry", [entry for group in GROUPS.values() for entry in group], ids=lambda e: e.name)
def test_the_catalogue_is_right(entry):
    env = make(entry.name)
    spec = describe(env)
    env.close()
    assert (spec.obs_size, spec.act_size) == (entry.obs_size, entry.act_size)


def test_tensorboard_has_the_figures_of_the_logs(run):
    events = EventAccumulator(str(run / "tensorboard" / "seed1")).Reload()
    rows = [row for row in read_rows(run / "progress.csv") if row["seed"] == "1"]
    found = [(event.step, event.value) for event in events.Scalars("train/critic_loss")]
    assert found == [(int(r["time/total_timesteps"]), pytest.approx(float(r["train/critic_loss"]))) for r in rows]
    assert [event.step for event in events.Scalars("eval/mean_reward")] == [0, 40, 80]


@pytest.mark.slow
def test_weights_and_biases_works_without_an_account(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = dh.trackers.WandB(tmp_path)
    tracker.track(10, 0, {"train/critic_loss": 1.5})
    tracker.close()
    assert list(tmp_path.rglob("*.wandb"))


def test_callbacks_hear_of_iterations_and_tests_and_can_stop():
    class Heard(dh.Callback):
        def __init__(self):
            self.iterations, self.tests = [], {}

        def on_iteration(self, progress):
            self.iterations.append(progress.step)

        def on_evaluation(self, progress, evaluation):
            self.tests[evaluation.step] = set(evaluation.returns)
            return evaluation.step < 40

    heard = Heard()
    model = dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY).learn(160, callback=heard)
    assert heard.tests[0] == {0, 1} and 40 in heard.tests
    assert heard.iterations[-1] == model.num_timesteps < 160


def test_the_live_view_shows_how_far_how_well_and_what_now():
    console = Console(file=io.StringIO(), force_terminal=True, width=120, legacy_windows=False)
    with View("Pendulum-v1", 1000, console=console) as view:
        view.begin(0, 0, {})
        view.evaluated(0, {0: -1500.0, 1: -1000.0})
        view.evaluated(400, {0: -300.0, 1: -200.0})
        view.advance(400, 2, 65.0, {"model/validation_rmse": 0.123, "train/ent_coef": 0.05})
        view.phase("fitting the model, at most 99 epochs")
        capture = Console(file=io.StringIO(), width=120)
        capture.print(view)
        shown = capture.file.getvalue()  # type: ignore[attr-defined]
    for words in ("400 of 1,000 steps", "iteration 2", "at most 0:01:05 left", "model error 0.123", "temperature 0.05"):
        assert words in shown
    assert "fitting the model" in shown and "seed 1" in shown and "▁█" in shown and "-250" in shown


@pytest.mark.parametrize("width", [80, 100])
def test_the_live_view_fits_a_terminal(width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, legacy_windows=False)
    with View("paper/HalfCheetah", 100_000, console=console) as view:
        view.begin(36_000, 180, {35_000: {0: 7000.0, 1: 6000.0}})
        begun = shown_by(view, width)
        view.advance(37_200, 186, 3723.0, {"rollout/ep_rew_mean": 6543.21, "model/validation_rmse": 0.123})
        later = shown_by(view, width)
    assert "36,000 of 100,000 steps" in begun and "iteration 180" in begun  # not 0, where a run goes on
    head = next(line for line in later.splitlines() if "37,200" in line)
    assert "37,200 of 100,000 steps" in head and "at most 1:02:03 left" in head and "paper/HalfCheetah" in head


def shown_by(view: View, width: int) -> str:
    capture = Console(file=io.StringIO(), width=width)
    capture.print(view)
    return capture.file.getvalue()  # type: ignore[attr-defined]


def test_without_a_terminal_the_view_is_plain_lines_and_quiet_is_quiet():
    for quiet in (False, True):
        console = Console(file=io.StringIO(), width=120)
        with View("Pendulum-v1", 1000, quiet, console) as view:
            view.begin(0, 0, {})
            view.evaluated(0, {0: -1500.0})
            view.advance(400, 2, 65.0)
            view.advance(600, 3, 60.0, {"rollout/ep_rew_mean": -321.0})
            view.advance(800, 4, 55.0, {})
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        lines = ["step 0: test return -1500", "step 400/1000  at most 0:01:05 left  test return -1500 at 0"]
        for step, left in ((600, "0:01:00"), (800, "0:00:55")):  # what was heard last is shown until there is more
            words = "training return -321  test return -1500 at 0"
            lines.append(f"step {step}/1000  at most {left} left  {words}")
        assert shown == ("" if quiet else "".join(f"Pendulum-v1  {line}\n" for line in lines))


def test_a_test_return_is_shown_with_its_spread():
    assert with_spread({4: -157.0}, {4: 90.0}, 10) == "-157 ± 90 (std over 10 episodes)"
    assert with_spread({4: 3.0}, {}, 1) == "3 (1 episode)"
    assert (
        with_spread({0: 1.0, 1: 2.0, 2: 6.0}, {0: 9.0}, 5) == "3 ± 2.65 (std over 3 seeds, 5 episodes each)"
    )  # sqrt(14 / 2)


def test_a_run_that_gained_nothing_says_so(run, tmp_path, capsys):
    assert no_gain({0: {0: 1.0, 1: 3.0}, 20: {0: 0.0, 1: 4.0}})
    assert not no_gain({0: {0: 1.0, 1: 3.0}, 20: {0: 0.0, 1: 4.1}, 40: {0: 0.0, 1: 0.0}})
    assert not no_gain({0: {0: 1.0}}) and not no_gain({20: {0: 1.0}})
    shutil.copytree(run, tmp_path / "runs" / "one")
    rows = read_rows(run / "eval.csv")
    best = max(float(row["reward"]) for row in rows)
    for first, told in ((best + 1.0, True), (best - 1e6, False)):
        changed = [row | ({"reward": str(first)} if row["step"] == "0" else {}) for row in rows]
        write_rows(tmp_path / "runs" / "one" / "eval.csv", changed)
        assert (NO_GAIN in said(capsys, "list", str(tmp_path / "runs"))) == told
        write_report([tmp_path / "runs" / "one"], tmp_path / "report.html")
        assert (NO_GAIN in (tmp_path / "report.html").read_text()) == told


def test_ctrl_c_in_python_is_one_line(run_folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.excepthook", lambda *problem: print("a traceback", file=sys.stderr))

    def interrupt(progress):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)  # the signal ends it

    monkeypatch.setattr("signal.getsignal", lambda number: signal.default_int_handler)  # also in the background
    model = dh.DHMBPO("Pendulum-v1", config=TINY)
    with pytest.raises(KeyboardInterrupt) as stopped:
        model.learn(60, out=run_folder, callback=interrupt)
    sys.excepthook(stopped.type, stopped.value, stopped.tb)
    line = f"doublehorizon: stopped. Pendulum-v1 is at step 0. Continue with: doublehorizon resume {run_folder}\n"
    assert capsys.readouterr().err == line
    assert stopped.value._render_traceback_() == [line.strip()]
    sys.excepthook(ValueError, ValueError("another"), None)
    assert capsys.readouterr().err == "a traceback\n"


def test_sparklines():
    assert sparkline([0.0, 1.0, 2.0, 7.0]) == "▁▂▃█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert len(sparkline(list(map(float, range(100))))) == 24
