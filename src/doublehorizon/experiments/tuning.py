"""Search for better numbers: trials are runs with other values of the config, proposed by Optuna, stopped early where
they fall behind. A trial's score is the mean of its tests, so that whoever learns in fewer steps is ahead."""

import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doublehorizon.config import Config
from doublehorizon.config_json import changed, written_value
from doublehorizon.errors import UserError
from doublehorizon.experiments import jobs as work
from doublehorizon.experiments.jobs import Job
from doublehorizon.experiments.launchers import stop
from doublehorizon.run.run_reader import read_rows


@dataclass(frozen=True)
class Dimension:
    """A number of the config and where to look for it: among some values, or between two, by their logarithm if asked
    for."""

    name: str
    values: tuple[Any, ...] = ()
    low: float | int = 0
    high: float | int = 0
    log: bool = False

    def suggest(self, trial: Any) -> Any:
        """A value for an Optuna trial."""
        if self.values:
            return trial.suggest_categorical(self.name, self.values)
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(self.name, self.low, self.high, log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, log=self.log)


DEFAULT_SPACE = (
    "policy.learning_rate=1e-4:1e-3:log",
    "policy.discount=None,0.98,0.99",
    "policy.updates_per_step=1.0,2.0,4.0",
    "policy.target_entropy_per_action=-1.0,-0.5",
    "policy.replay_start_share=0.0,0.5",
    "horizons.training=1:8",
    "horizons.distribution=5:40",
    "fit.learning_rate=5e-4:4e-3:log",
)
"""What most often matters, and is safe to change."""


def dimension(text: str, config: Config) -> Dimension:
    """NAME=A,B,C or NAME=LOW:HIGH or NAME=LOW:HIGH:log; the config must take such values."""
    name, equals, rest = text.partition("=")
    needed = f"{text!r} is no range. Write NAME=A,B,C, NAME=LOW:HIGH or NAME=LOW:HIGH:log, as policy.discount=0.98,0.99"
    if not equals or not rest:
        raise UserError(needed + ".")
    if ":" not in rest:
        found = Dimension(name, values=tuple(written_value(word) for word in rest.split(",")))
        ends = found.values
    else:
        first, last, *log = rest.split(":")
        ends = (written_value(first), written_value(last))
        numbers = all(isinstance(end, int | float) for end in ends)
        if log not in ([], ["log"]) or not numbers or ends[0] >= ends[1] or (log and ends[0] <= 0):
            raise UserError(needed + "; LOW is below HIGH, and above 0 with log.")
        found = Dimension(name, low=ends[0], high=ends[1], log=bool(log))
    for value in ends:
        changed(config, {name: value})  # says what is wrong with it
    return found


def tests_of(folder: Path) -> list[tuple[int, float]]:
    """Step and mean return of each test so far, but for the one before anything was learnt."""
    found: dict[int, list[float]] = {}
    try:
        for row in read_rows(folder / "eval.csv"):
            found.setdefault(int(row["step"]), []).append(float(row["reward"]))
    except (UserError, ValueError, LookupError):  # not there yet, or just being written
        return []
    return [(step, sum(returns) / len(returns)) for step, returns in sorted(found.items()) if step > 0]


def score_of(folder: Path) -> float:
    """The mean of a run's tests."""
    tests = tests_of(folder)
    if not tests:
        raise UserError(f"{folder} has no test after step 0: ask for more --steps, or test more often.")
    return sum(value for _, value in tests) / len(tests)


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: done, stopped early, or failed with a word on why. Only what is done has a score."""

    state: str
    score: float | None = None
    why: str = ""


class RunningTrial:
    """A job in a process of its own, whose tests are listened to. `is_behind` hears of each, and says whether to stop;
    `step` is that of the last."""

    def __init__(self, job: Job, folder: Path, is_behind: Callable[[int, float], bool] = lambda step, value: False):
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.job, self.folder, self.step = job, folder, 0
        self._is_behind, self._log = is_behind, tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._process = work.start(job, folder, self._log)

    def outcome(self) -> Outcome | None:
        """How it ended; None while it goes on."""
        status = self._process.poll()
        for step, value in tests_of(self.folder) if status is None else ():
            if step > self.step and step < self.job.steps and self._is_behind(step, value):
                self.stop()
                return Outcome("stopped early")
            self.step = max(self.step, step)
        if status is None:
            return None
        with self._log:
            return (
                Outcome("failed", why=work.last_line(self._log)) if status else Outcome("done", score_of(self.folder))
            )

    def stop(self) -> None:
        """It saves what it has."""
        with self._log:
            stop(self._process)


def finish(
    trials: list[RunningTrial], watch: Callable[[], None] = lambda: None
) -> Generator[tuple[RunningTrial, Outcome], None, None]:
    """Each of the trials as it ends; more may be added to the list meanwhile. `watch` is called now and then. Whatever
    happens, none is left running."""
    try:
        while trials:
            time.sleep(0.2)
            watch()
            for trial in list(trials):
                outcome = trial.outcome()
                if outcome is not None:
                    trials.remove(trial)
                    yield trial, outcome
    finally:
        for trial in trials:
            trial.stop()


def open_study(folder: Path, trials_before_pruning: int, seed: int) -> Any:
    """Optuna's study in a folder: a search that was stopped goes on when it is opened again. Trials that still run
    count as bad ones, so that those beside them look elsewhere."""
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError as problem:
        raise UserError("tune needs Optuna, which is not installed: pip install 'doublehorizon[tune]'.") from problem
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "study.log")))
    return optuna.create_study(
        study_name="tune",
        storage=storage,
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=6, constant_liar=True),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=trials_before_pruning),
    )
