"""Learning curves: reading them, and comparing two sets of them seed by seed."""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from doublehorizon.analysis.aggregate import Scores
from doublehorizon.atomic_files import read_file, read_json
from doublehorizon.errors import UserError

Curves = dict[str, dict[int, float]]
"""Return by step, for each run of a task (a seed, or the n-th run of it)."""


@dataclass(frozen=True)
class Comparison:
    """Scores of two sets of runs, and the Welch interval of the difference of their means. It is `interpolated` if not
    every run was tested at each of the steps."""

    steps: tuple[int, ...]
    interpolated: bool
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    difference: float
    low: float
    high: float

    @property
    def below(self) -> bool:
        """Whether ours is worse beyond chance: the whole interval is below zero."""
        return self.high < 0

    @property
    def above(self) -> bool:
        """Whether ours is better beyond chance."""
        return self.low > 0


def read_curves(path: Path, column: str = "reward") -> Curves:
    """Reads a CSV with the columns `step`, `reward` and `seed` (more are fine); another column instead of rewards."""
    curves: Curves = {}
    seen: Counter[tuple[str, int]] = Counter()
    try:
        for row in csv.DictReader(io.StringIO(read_file(path).decode(), newline="")):
            step = round(float(row["step"]))
            seen[row["seed"], step] += 1
            count = seen[row["seed"], step]
            name = row["seed"] if count == 1 else f"{row['seed']}#{count}"
            curves.setdefault(name, {})[step] = float(row[column])
    except (OSError, KeyError, ValueError, TypeError) as problem:
        raise UserError(f"{path} cannot be read as curves with columns step,{column},seed: {problem!r}.") from problem
    if not curves:
        raise UserError(f"{path} holds no evaluations.")
    return curves


def find_curves(path: Path, task: str | None = None, column: str = "reward") -> Curves:
    """Curves of a CSV file, of a run folder, or of `<task>.csv` in a folder of published curves."""
    if path.is_file():
        return read_curves(path, column)
    if (path / "eval.csv").is_file():
        return read_curves(path / "eval.csv", column)
    if task is not None and (path / f"{task}.csv").is_file():
        return read_curves(path / f"{task}.csv", column)
    wanted = f"eval.csv or {task}.csv" if task else "eval.csv"
    raise UserError(f"{path} holds no {wanted}. Give a run folder, a CSV file, or a folder of published curves.")


def joined(some: Curves, more: Curves) -> Curves:
    """The seeds of two runs of the same task, as one set."""
    twice = [name for name in more if name in some]
    if twice:
        raise UserError(f"seed {twice[0]} is in two of the runs, so they cannot be taken together.")
    return some | more


def task_of(run: Path) -> str | None:
    """The task a run folder was trained on, as published files name it: `paper/Hopper` is `Hopper`."""
    try:
        name = read_json(run / "config.json")["env"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(name).rsplit("/", 1)[-1]


def compare(ours: Curves, theirs: Curves, steps: tuple[int, ...]) -> Comparison:
    """Each run scores its mean return over `steps`; the interval is Welch's, 95%."""
    our_scores, their_scores = scores(ours, steps), scores(theirs, steps)
    if min(len(our_scores), len(their_scores)) < 2:
        raise UserError("a comparison needs at least two seeds on either side.")
    interpolated = any(step not in curve for curve in (*ours.values(), *theirs.values()) for step in steps)
    test = stats.ttest_ind(our_scores, their_scores, equal_var=False)
    interval = test.confidence_interval(0.95)
    difference = float(np.mean(our_scores) - np.mean(their_scores))
    bounds = float(interval.low), float(interval.high)
    return Comparison(steps, interpolated, tuple(our_scores), tuple(their_scores), difference, *bounds)


def scores(curves: Curves, steps: tuple[int, ...]) -> list[float]:
    """One number per run. A run that ended before one of the steps is an error, not a smaller mean."""
    for name, curve in curves.items():
        beyond = [step for step in steps if not min(curve) <= step <= max(curve)]
        if beyond:
            raise UserError(
                f"seed {name} has no evaluation at step {beyond[0]}; it has: {', '.join(map(str, sorted(curve)))}."
            )
    return [float(np.mean([return_at(curve, step) for step in steps])) for curve in curves.values()]


def return_at(curve: Mapping[int, float], step: int) -> float:
    """A run's return at a step; between two tests, on the line that joins them: methods are tested at other steps."""
    steps = sorted(curve)
    return float(np.interp(step, steps, [curve[tested] for tested in steps]))


def common_steps(curves: Curves, until: int | None = None) -> list[int]:
    """The steps at which every seed was tested."""
    common = sorted(set.intersection(*(set(curve) for curve in curves.values())))
    if not common:
        raise UserError(
            f"seeds {', '.join(map(str, curves))} were tested at no step that all have. Compare other runs."
        )
    return [step for step in common if until is None or step <= until]


def normalized_scores(
    tasks: Mapping[str, Mapping[str, Curves]], labels: Sequence[str], unit: str, until: int | None = None
) -> tuple[dict[str, Scores], dict[str, float]]:
    """Returns of the methods `labels`, which every task has, at the last step that all of their runs come to, in units
    of the mean of the method `unit`; and these units, by task. Nothing for a single task, or where a run has no test
    after its start."""
    found: dict[str, Scores] = {label: {} for label in labels}
    units: dict[str, float] = {}
    for task, methods in tasks.items():
        runs = [curve for label in labels for curve in methods[label].values()]
        step = min(max(tested for tested in curve if until is None or tested <= until) for curve in runs)
        if step == 0 or len(tasks) < 2:
            return {}, {}
        finals = {label: np.array(scores(methods[label], (step,))) for label in labels}
        units[task] = float(np.mean(finals[unit]))
        for label, values in finals.items():
            found[label][task] = values / units[task]
    return found, units


def mean_and_interval(curves: Curves, steps: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Mean over seeds at these steps, and half the width of its 95% interval."""
    return mean_and_half_width(np.array([[curve[step] for step in steps] for curve in curves.values()]))


def mean_and_half_width(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the first axis, and half the width of its 95% interval (Student's; 0 for a single row)."""
    if len(values) < 2:
        return values.mean(0), np.zeros(values.shape[1:])
    return values.mean(0), stats.t.ppf(0.975, len(values) - 1) * stats.sem(values, axis=0)
