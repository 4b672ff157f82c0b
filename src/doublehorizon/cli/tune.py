"""`doublehorizon tune`."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from doublehorizon.cli.options import Device, PathIfGiven, Steps, require_positive
from doublehorizon.cli.parsing import parse
from doublehorizon.config import Config
from doublehorizon.config_json import changed, to_json
from doublehorizon.errors import RunError, UserError
from doublehorizon.experiments.jobs import Job, is_done
from doublehorizon.experiments.tuning import (
    DEFAULT_SPACE,
    Dimension,
    Outcome,
    RunningTrial,
    dimension,
    finish,
    open_study,
    score_of,
)
from doublehorizon.presets import preset
from doublehorizon.signals import Stopped, stoppable
from doublehorizon.training.live_view import clock

_SPACE = "\n".join(f"  {text}" for text in DEFAULT_SPACE)
_EXAMPLES = f"""Searches for numbers of the algorithm that learn an environment in fewer steps. Each trial trains
some seeds with other values; those that fall behind are stopped early. The preset is tried first. In the end it and the
best are trained again with fresh seeds, as the best of many is also the luckiest.

examples:
  doublehorizon tune Pendulum-v1 --preset quick --steps 1600 --trials 20
  doublehorizon tune my_robot:make_env --space policy.discount=0.98,0.99,0.995 horizons.training=2:8
  doublehorizon train Pendulum-v1 --config tuning/Pendulum-v1/best.json

The score of a trial is the mean of its tests after step 0. A search that was stopped goes on when the same command is
given again. Trials run side by side (--parallel); learning rates, discount and entropy target need no new compilation,
horizons do. Without --space it looks for:
{_SPACE}"""


@dataclass
class Tune:
    """What `doublehorizon tune` takes."""

    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]
    """An environment, named as in train."""
    trials: int = 20
    """How many sets of values to try."""
    steps: Steps = 5000
    """Simulator steps per seed of each trial."""
    seeds: int = 3
    """Seeds of each trial, side by side."""
    seed: int = 0
    """The first seed, and that of the search."""
    parallel: int = 2
    """Trials that run side by side, each a process of its own on the same device."""
    confirm_seeds: int = 5
    """Fresh seeds with which the best and the preset are compared in the end. Fewer than 2: no comparison."""
    preset: Literal["dhmbpo", "paper", "light", "quick"] = "quick"
    """What the trials start from."""
    space: tuple[str, ...] = DEFAULT_SPACE
    """What to look for: NAME=A,B,C, NAME=LOW:HIGH or NAME=LOW:HIGH:log each."""
    evaluate_every: int = 2
    """Iterations between two tests: often, as a search lives on them."""
    out: PathIfGiven = None
    """The folder of the search. Default: tuning/ENV."""
    device: Device = None
    """Where to learn. Default: a GPU if JAX sees one."""
    quiet: bool = False
    """Show no progress."""
    json: bool = False
    """Print the result as JSON."""


def run(arguments: list[str]) -> int:
    """Parses, searches, and says what was found."""
    options = parse(Tune, "tune", _EXAMPLES, arguments)
    require_positive(options, "trials", "steps", "seeds", "evaluate_every", "parallel")
    base = changed(preset(options.preset), {"loop.evaluate_every": options.evaluate_every})
    space = [dimension(text, base) for text in options.space]
    root = options.out or Path("tuning") / options.env.replace("/", "-").replace(":", "-")
    search = _Search(options, base, space, root)
    with stoppable(), _hint(root):
        baseline = search.baseline()
        search.run()
        best = search.best(baseline)
        values = {} if best is None else best.params
        found = to_json(changed(preset(options.preset), values))  # tests as often as the preset has them
        (root / "best.json").write_text(json.dumps(found, indent=1) + "\n")
        compared = search.confirm(best) if best is not None and options.confirm_seeds > 1 else None
    _report(search, baseline, best, compared)
    return 0


@contextmanager
def _hint(root: Path) -> Iterator[None]:
    """A search that is stopped says how it goes on."""
    try:
        yield
    except Stopped:
        print(f"{root} keeps the trials that are over; the same command goes on with the others.", file=sys.stderr)
        raise


class _Search:
    """Trials side by side, in folders under `root`."""

    def __init__(self, options: Tune, base: Config, space: list[Dimension], root: Path):
        self.options, self.base, self.space, self.root = options, base, space, root
        self.study = open_study(root, trials_before_pruning=4, seed=options.seed)
        self.console = Console(stderr=True, emoji=False)
        self.running: list[RunningTrial] = []
        self.trials: dict[RunningTrial, tuple[str, Any, dict[str, Any]]] = {}
        self.begun, self.before, self.asked = 0.0, 0, 0

    def config(self, values: dict[str, Any]) -> Config:
        """The preset with a trial's values."""
        return changed(self.base, values)

    def baseline(self) -> float:
        """The preset's score with the seeds of the trials. It runs alone: trials find compiled what it compiles."""
        job = self._job("preset", self.base, self.options.seeds, self.options.seed)
        (score,) = self._scores("the preset", {"the preset": (job, self.root / "preset")})
        return score

    def finished(self) -> list[Any]:
        """Trials that are over, whatever came of them."""
        return [trial for trial in self.study.trials if trial.state.is_finished()]

    def scored(self) -> list[Any]:
        """Trials that ran to the end, the best first. One that was stopped early has a value too, its last test's."""
        done = (trial for trial in self.finished() if trial.state.name == "COMPLETE")
        return sorted(done, key=lambda trial: -trial.value)

    def run(self) -> None:
        """Tries until there are as many trials as asked for."""
        self.begun, self.before = time.monotonic(), len(self.finished())
        self.asked = self.before
        self._fill()
        with self._status("trials") as status, closing(finish(self.running, lambda: self._show(status))) as ends:
            for process, outcome in ends:
                self._tell(*self.trials.pop(process), outcome)
                self._fill()

    def _fill(self) -> None:
        """Starts trials while there is room for them."""
        while self.asked < self.options.trials and len(self.running) < self.options.parallel:
            self.asked += 1
            trial = self.study.ask()
            values = {one.name: one.suggest(trial) for one in self.space}
            name = f"trial {self.asked} of {self.options.trials}"
            try:
                process = self._start(trial, values)
            except UserError as problem:  # values that do not go together
                self._tell(name, trial, values, Outcome("failed", why=str(problem)))
            else:
                self.running.append(process)
                self.trials[process] = (name, trial, values)

    def _start(self, trial: Any, values: dict[str, Any]) -> RunningTrial:
        def is_behind(step: int, value: float) -> bool:
            trial.report(value, step)
            return trial.should_prune()

        job = self._job("trial", self.config(values), self.options.seeds, self.options.seed)
        return RunningTrial(job, self.root / "trials" / str(trial.number), is_behind)

    def _show(self, status: Any) -> None:
        if status is not None:
            each = (f"{self.trials[one][0]}: step {one.step:,} of {one.job.steps:,}" for one in self.running)
            status.update("; ".join(each) + self._left())

    def _tell(self, name: str, trial: Any, values: dict[str, Any], outcome: Outcome) -> None:
        """What came of a trial, to the study and to whoever watches."""
        from optuna.trial import TrialState

        ends = {"done": TrialState.COMPLETE, "stopped early": TrialState.PRUNED, "failed": TrialState.FAIL}
        self.study.tell(trial, outcome.score, state=ends[outcome.state])
        told = outcome.why or outcome.state if outcome.score is None else f"score {outcome.score:.5g}"
        self._say(f"{name}: {told}  {_written(values)}{self._left()}")

    def _left(self) -> str:
        """How long the rest of the trials will take, if some are over."""
        done = len(self.finished())
        if done == self.before:
            return ""
        each = (time.monotonic() - self.begun) / (done - self.before)
        return f", about {clock(each * (self.options.trials - done))} left"

    def best(self, baseline: float) -> Any:
        """The trial with the best score; None where none is better than the preset."""
        return next((trial for trial in self.scored() if trial.value > baseline), None)

    def confirm(self, best: Any) -> tuple[float, float, float]:
        """Difference of the best and the preset with fresh seeds, and its interval."""
        from doublehorizon.analysis.curves import common_steps, compare, read_curves

        folder, first = self.root / f"confirm-{best.number}", self.options.seed + 1000
        fresh = f"{self.options.confirm_seeds} fresh seeds"
        runs = {
            f"{name}, {fresh}": (self._job(name, config, self.options.confirm_seeds, first), folder / name)
            for name, config in (("preset", self.base), ("best", self.config(best.params)))
        }
        self._scores(f"the preset and the best with {fresh}", runs)
        preset_curves, best_curves = (read_curves(folder / name / "eval.csv") for name in ("preset", "best"))
        steps = tuple(step for step in common_steps(best_curves) if step > 0)
        result = compare(best_curves, preset_curves, steps)
        return result.difference, result.low, result.high

    def _scores(self, words: str, runs: dict[str, tuple[Job, Path]]) -> list[float]:
        """Scores of runs by name, made side by side where they are not there yet."""
        waiting = [RunningTrial(job, folder) for job, folder in runs.values() if not is_done(job, folder)]
        with self._status(words), closing(finish(waiting)) as ends:
            for _, outcome in ends:
                if outcome.state != "done":
                    raise RunError(f"{words}: {outcome.why}")
        found = [score_of(folder) for _, folder in runs.values()]
        for name, score in zip(runs, found, strict=True):
            self._say(f"{name}: score {score:.5g}")
        return found

    def _job(self, name: str, config: Config, seeds: int, seed: int) -> Job:
        return Job(self.options.env, name, config, self.options.steps, seeds, seed, self.options.device)

    def _status(self, words: str) -> Any:
        live = self.console.is_terminal and not self.options.quiet
        return self.console.status(words) if live else nullcontext()

    def _say(self, words: str) -> None:
        if not self.options.quiet:
            self.console.print(words, highlight=False, markup=False, soft_wrap=True)


def _written(values: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()
    )


def _report(search: _Search, baseline: float, best: Any, compared: tuple[float, float, float] | None) -> None:
    """The best trials, and what fresh seeds say."""
    done = search.scored()
    file = search.root / "best.json"
    if search.options.json:
        trials = [{"trial": t.number, "score": t.value, "values": t.params} for t in done]
        print(json.dumps({"best": str(file), "preset": baseline, "trials": trials, "confirmed": compared}))
        return
    print(f"{len(search.finished())} trials, {len(done)} of them to the end; the best by score:")
    for trial in done[:5]:
        print(f"  {trial.value:9.5g}  trials/{trial.number}: {_written(trial.params)}")
    print(f"  {baseline:9.5g}  the preset {search.options.preset}")
    if best is None:
        print("Nothing was better than the preset.")
    if compared is not None:
        difference, low, high = compared
        verdict = "better" if low > 0 else "worse" if high < 0 else "neither better nor worse"
        print(
            f"With {search.options.confirm_seeds} fresh seeds the best differs from the preset by {difference:.5g}, "
            f"95% interval [{low:.5g}, {high:.5g}]: {verdict} beyond chance."
        )
    print(f"Train with it: doublehorizon train {search.options.env} --config {file}")
