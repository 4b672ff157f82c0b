"""`doublehorizon tune`."""

import json
import time
from contextlib import nullcontext
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
    dimension,
    open_study,
    run_trial,
    score_of,
)
from doublehorizon.presets import preset
from doublehorizon.signals import stoppable
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
given again. Without --space it looks for:
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
    require_positive(options, "trials", "steps", "seeds", "evaluate_every")
    base = changed(preset(options.preset), {"loop.evaluate_every": options.evaluate_every})
    space = [dimension(text, base) for text in options.space]
    root = options.out or Path("tuning") / options.env.replace("/", "-").replace(":", "-")
    search = _Search(options, base, space, root)
    with stoppable():
        baseline = search.baseline()
        search.run()
        best = search.best(baseline)
        values = {} if best is None else best.params
        found = to_json(changed(preset(options.preset), values))  # tests as often as the preset has them
        (root / "best.json").write_text(json.dumps(found, indent=1) + "\n")
        compared = search.confirm(best) if best is not None and options.confirm_seeds > 1 else None
    _report(search, baseline, best, compared)
    return 0


class _Search:
    """Trials one after another, in folders under `root`."""

    def __init__(self, options: Tune, base: Config, space: list[Dimension], root: Path):
        self.options, self.base, self.space, self.root = options, base, space, root
        self.study = open_study(root, trials_before_pruning=4, seed=options.seed)
        self.console = Console(stderr=True, emoji=False)

    def config(self, values: dict[str, Any]) -> Config:
        """The preset with a trial's values."""
        return changed(self.base, values)

    def baseline(self) -> float:
        """The preset's score with the seeds of the trials."""
        job, folder = self._job("preset", self.base, self.options.seeds, self.options.seed), self.root / "preset"
        if not is_done(job, folder):
            with self._status("the preset"):
                outcome = run_trial(job, folder, lambda *_: False, lambda _: None)
            if outcome.state != "done":
                raise RunError(f"the preset's own values failed: {outcome.why}")
        self._say(f"the preset: score {score_of(folder):.5g}")
        return score_of(folder)

    def finished(self) -> list[Any]:
        """Trials that are over, whatever came of them."""
        return [trial for trial in self.study.trials if trial.state.is_finished()]

    def run(self) -> None:
        """Tries until there are as many trials as asked for."""
        begun, before = time.monotonic(), len(self.finished())
        while (done := len(self.finished())) < self.options.trials:
            left = (
                (time.monotonic() - begun) / (done - before) * (self.options.trials - done) if done > before else None
            )
            self._try(done, "" if left is None else f", about {clock(left)} left")

    def _try(self, done: int, left: str) -> None:
        from optuna.trial import TrialState

        trial = self.study.ask()
        values = {one.name: one.suggest(trial) for one in self.space}
        where = f"trial {done + 1} of {self.options.trials}"
        try:
            job = self._job("trial", self.config(values), self.options.seeds, self.options.seed)
        except UserError as problem:  # values that do not go together
            outcome = Outcome("failed", why=str(problem))
        else:
            with self._status(f"{where}{left}") as status:

                def tell(step: int) -> None:
                    if status is not None:
                        status.update(f"{where}: step {step:,} of {job.steps:,}{left}")

                def is_behind(step: int, value: float) -> bool:
                    trial.report(value, step)
                    return trial.should_prune()

                outcome = run_trial(job, self.root / "trials" / str(trial.number), is_behind, tell)
        ends = {"done": TrialState.COMPLETE, "stopped early": TrialState.PRUNED, "failed": TrialState.FAIL}
        self.study.tell(trial, outcome.score, state=ends[outcome.state])
        told = outcome.why or outcome.state if outcome.score is None else f"score {outcome.score:.5g}"
        self._say(f"{where}: {told}  {_written(values)}{left}")

    def best(self, baseline: float) -> Any:
        """The trial with the best score; None where none is better than the preset."""
        done = [trial for trial in self.study.trials if trial.value is not None and trial.value > baseline]
        return max(done, key=lambda trial: trial.value, default=None)

    def confirm(self, best: Any) -> tuple[float, float, float]:
        """Difference of the best and the preset with fresh seeds, and its interval."""
        from doublehorizon.analysis.curves import common_steps, compare, read_curves

        first, found = self.options.seed + 1000, []
        for name, config in (("preset", self.base), ("best", self.config(best.params))):
            job = self._job(name, config, self.options.confirm_seeds, first)
            folder = self.root / f"confirm-{best.number}" / name
            if not is_done(job, folder):
                with self._status(f"{name}: {self.options.confirm_seeds} fresh seeds"):
                    outcome = run_trial(job, folder, lambda *_: False, lambda _: None)
                if outcome.state != "done":
                    raise RunError(f"the comparison with fresh seeds failed: {outcome.why}")
            self._say(f"{name}, {self.options.confirm_seeds} fresh seeds: score {score_of(folder):.5g}")
            found.append(read_curves(folder / "eval.csv"))
        preset_curves, best_curves = found
        steps = tuple(step for step in common_steps(best_curves) if step > 0)
        result = compare(best_curves, preset_curves, steps)
        return result.difference, result.low, result.high

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
    done = sorted((trial for trial in search.study.trials if trial.value is not None), key=lambda t: -t.value)
    file = search.root / "best.json"
    if search.options.json:
        trials = [{"trial": t.number, "score": t.value, "values": t.params} for t in done]
        print(json.dumps({"best": str(file), "preset": baseline, "trials": trials, "confirmed": compared}))
        return
    print(f"{len(search.finished())} trials, {len(done)} of them to the end; the best by score:")
    for trial in done[:5]:
        print(f"  {trial.value:9.5g}  trial {trial.number}: {_written(trial.params)}")
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
