"""The search for better numbers: its space, its scores, its processes."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import optuna
import pytest

from doublehorizon import presets
from doublehorizon.cli import _status
from doublehorizon.config_json import read_config
from doublehorizon.errors import UserError
from doublehorizon.experiments import tuning
from doublehorizon.experiments.jobs import Job
from doublehorizon.experiments.tuning import DEFAULT_SPACE, Dimension, dimension
from worlds import TINY

HEAD = "step,time,reward,seed\n"


def test_a_space_is_written_as_values_or_as_a_range():
    quick = presets.quick
    assert dimension("policy.discount=0.98,0.99", quick) == Dimension("policy.discount", values=(0.98, 0.99))
    assert dimension("horizons.training=2:8", quick) == Dimension("horizons.training", low=2, high=8)
    found = dimension("policy.learning_rate=1e-4:1e-3:log", quick)
    assert found == Dimension("policy.learning_rate", low=1e-4, high=1e-3, log=True)
    assert dimension("model.noise=constant,state", quick).values == ("constant", "state")
    assert len({dimension(text, config).name for text in DEFAULT_SPACE for config in (quick, presets.dhmbpo)}) == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("policy.discount", "is no range"),
        ("policy.discount=", "is no range"),
        ("policy.discount=0.99:0.9", "LOW is below HIGH"),
        ("policy.discount=0.9:0.99:linear", "is no range"),
        ("policy.discount=low:high", "is no range"),
        ("policy.learning_rate=0:1:log", "above 0 with log"),
        ("policy.discount=0.9,1.5", "policy.discount is 1.5"),
        ("policy.dsicount=0.9,0.99", "discount"),
        ("horizons.training=1.5:3.0", "horizons.training is 1.5"),
    ],
)
def test_a_wrong_range_is_told_before_anything_runs(text, words):
    with pytest.raises(UserError, match=words):
        dimension(text, presets.quick)


def test_each_kind_of_dimension_asks_for_its_own():
    class Trial:
        def suggest_categorical(self, *words):
            return words

        suggest_int = suggest_float = lambda self, *words, log: (*words, log)

    assert Dimension("a", values=(1, "x")).suggest(Trial()) == ("a", (1, "x"))
    assert Dimension("b", low=2, high=5).suggest(Trial()) == ("b", 2, 5, False)
    assert Dimension("c", low=0.1, high=5.0, log=True).suggest(Trial()) == ("c", 0.1, 5.0, True)


def test_a_score_is_the_mean_of_the_tests_after_step_0(tmp_path):
    assert tuning.tests_of(tmp_path) == []
    (tmp_path / "eval.csv").write_text(HEAD + "0,0,-99,0\n0,0,-99,1\n40,1,3,0\n40,1,5,1\n80,2,10,0\n80,2,20,1\n")
    assert tuning.tests_of(tmp_path) == [(40, 4.0), (80, 15.0)] and tuning.score_of(tmp_path) == 9.5
    (tmp_path / "eval.csv").write_text(HEAD + "0,0,-99,0\n")
    with pytest.raises(UserError, match="no test after step 0"):
        tuning.score_of(tmp_path)


def started(monkeypatch, folder: Path, script: str, is_behind=lambda step, value: False) -> tuple:
    """A trial whose process is a script."""
    processes = []

    def start(job, folder, log):
        folder.mkdir(parents=True)
        processes.append(subprocess.Popen([sys.executable, "-c", script], cwd=folder, stderr=log))
        return processes[0]

    monkeypatch.setattr(tuning.work, "start", start)
    return tuning.RunningTrial(Job("Pendulum-v1", "x", TINY, 80, 1), folder / "trial", is_behind), processes[0]


def writing(*tests: tuple[int, float]) -> str:
    """A script that writes tests."""
    rows = "".join(f"{step},0,{value},0\n" for step, value in tests)
    return f"open('eval.csv', 'w').write({HEAD + rows!r})"


def test_a_trial_is_done_stopped_early_or_failed(tmp_path, monkeypatch):
    heard: list[tuple[int, float]] = []

    def never(step: int, value: float) -> bool:
        heard.append((step, value))
        return False

    slow = f"{writing((0, -9), (40, 4))}; import time; time.sleep(1)"
    one, process = started(monkeypatch, tmp_path / "a", slow, never)
    ((ended, outcome),) = tuning.finish([one])
    assert ended is one and (outcome.state, outcome.score, process.poll()) == ("done", 4.0, 0)
    assert heard == [(40, 4.0)] and one.step == 40
    waiting = f"{writing((0, -9), (40, 4))}; import time; time.sleep(100)"
    one, process = started(monkeypatch, tmp_path / "b", waiting, lambda step, value: value < 5)
    ((_, outcome),) = tuning.finish([one])
    assert outcome.state == "stopped early" and outcome.score is None and process.poll() not in (None, 0)
    one, _ = started(monkeypatch, tmp_path / "c", "raise SystemExit('the arm is stuck')")
    ((_, outcome),) = tuning.finish([one])
    assert (outcome.state, outcome.why) == ("failed", "the arm is stuck")


def test_trials_run_side_by_side_more_may_come_and_none_is_left_running(tmp_path, monkeypatch):
    forever = f"{writing((40, 1))}; import time; time.sleep(100)"
    first, endless = started(monkeypatch, tmp_path / "a", forever)
    second, _ = started(monkeypatch, tmp_path / "b", writing((40, 2)))
    trials = [first, second]
    ends = tuning.finish(trials)
    one, outcome = next(ends)
    assert one is second and outcome.score == 2.0 and trials == [first]
    third, _ = started(monkeypatch, tmp_path / "c", writing((40, 3)))
    trials.append(third)
    assert next(ends)[0] is third and endless.poll() is None
    with pytest.raises(KeyboardInterrupt):
        ends.throw(KeyboardInterrupt)
    assert endless.poll() not in (None, 0)


def test_a_study_goes_on_where_it_was(tmp_path):
    for number in range(2):
        study = tuning.open_study(tmp_path, 4, seed=0)
        assert len(study.trials) == number
        study.tell(study.ask(), 1.0 + number)
    assert tuning.open_study(tmp_path, 4, seed=0).best_value == 2.0


def test_a_trial_that_was_stopped_early_is_never_the_best(tmp_path):
    from doublehorizon.cli.tune import Tune, _report, _Search

    search = _Search(Tune("Pendulum-v1"), TINY, [], tmp_path)
    for value, state in ((9.0, "PRUNED"), (3.0, "COMPLETE"), (5.0, "COMPLETE"), (None, "FAIL")):
        trial = search.study.ask()
        if value is not None:
            trial.report(value, 40)  # which Optuna takes for the value of a trial that it stops
        done = value if state == "COMPLETE" else None
        search.study.tell(trial, done, state=getattr(optuna.trial.TrialState, state))
    assert [trial.value for trial in search.scored()] == [5.0, 3.0] and len(search.finished()) == 4
    assert search.best(4.0).number == 2 and search.best(6.0) is None
    with redirect_stdout(io.StringIO()) as told:
        _report(search, 4.0, search.best(4.0), None)
    assert "4 trials, 2 of them to the end" in told.getvalue() and "trials/2: " in told.getvalue()


@pytest.mark.slow
def test_a_search_finds_confirms_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("doublehorizon.cli.tune.preset", lambda name: TINY)
    words = ["tune", "Pendulum-v1", "--steps", "80", "--seeds", "1", "--confirm-seeds", "2", "--out", str(tmp_path)]
    space = ["--space", "policy.discount=0.9,0.95", "horizons.training=1:3"]
    assert _status([*words, "--trials", "2", *space, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["trials"]) == 2 and (tmp_path / "preset" / "eval.csv").exists()
    best = read_config(tmp_path / "best.json")
    top = max(found["trials"], key=lambda one: one["score"])
    if top["score"] > found["preset"]:
        assert best.policy.discount == top["values"]["policy.discount"] and len(found["confirmed"]) == 3
    else:
        assert best == TINY and found["confirmed"] is None
    assert _status([*words, "--trials", "3", *space]) == 0  # one more
    out, err = capsys.readouterr()
    assert "3 trials" in out and "trial 3 of 3: score" in err and "trial 2 of 3" not in err
    assert "doublehorizon train Pendulum-v1 --config" in out
