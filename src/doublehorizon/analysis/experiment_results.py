"""What came of an experiment: a table of final returns, and a figure with published curves beside our own."""

import csv
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from doublehorizon.analysis.aggregate import Interval, aggregate
from doublehorizon.analysis.curves import Curves, common_steps, mean_and_interval, normalized_scores, read_curves
from doublehorizon.analysis.figures import draw_aggregates, draw_curves, figure_of, save_figure
from doublehorizon.experiments.jobs import Job
from doublehorizon.experiments.paper_experiments import PaperExperiment
from doublehorizon.run.run_reader import read_rows


@dataclass(frozen=True)
class Line:
    """One variant on one task, at the last step that all of its seeds have."""

    task: str
    variant: str
    seeds: int
    step: int
    mean: float
    half: float
    published: float | None
    minutes: float
    complete: bool


@dataclass(frozen=True)
class Outcome:
    """Curves, and published ones where there are any, by task and variant; and the table."""

    curves: dict[str, dict[str, Curves]]
    published: dict[str, dict[str, dict[int, float]]]
    """Mean returns by step."""
    lines: list[Line]
    scores: dict[str, dict[str, Interval]]
    """Over tasks, in units of the first variant's mean; empty for a single task."""


def gather(jobs: list[Job], root: Path, experiment: PaperExperiment, reference: Path | None) -> Outcome:
    """Reads all runs that have been tested at least once."""
    curves: dict[str, dict[str, Curves]] = {}
    published: dict[str, dict[str, dict[int, float]]] = {}
    lines = []
    for job in jobs:
        path = root / job.name / "eval.csv"
        if not path.exists() or not read_rows(path):
            continue
        ours = read_curves(path)
        theirs = _published(reference, experiment.variants[job.variant].published, job.task)
        curves.setdefault(job.task, {})[job.variant] = ours
        if theirs:
            published.setdefault(job.task, {})[job.variant] = theirs
        lines.append(_line(job, root / job.name, ours, theirs))
    return Outcome(curves, published, lines, _scores(curves))


def _published(reference: Path | None, folders: tuple[str, ...], task: str) -> dict[int, float]:
    """The mean of the runs that got so far, at each step that at least half of all runs have reached."""
    name = f"{task.rsplit('/', 1)[-1]}.csv"
    paths = [] if reference is None else [reference / folder / name for folder in folders]
    runs = next((list(read_curves(path).values()) for path in paths if path.is_file()), [])
    found = {}
    for step in sorted({step for run in runs for step in run}):
        values = [run[step] for run in runs if step in run]
        if 2 * len(values) >= len(runs):
            found[step] = float(np.mean(values))
    return found


def _line(job: Job, folder: Path, ours: Curves, theirs: dict[int, float]) -> Line:
    step = common_steps(ours)[-1]
    mean, half = mean_and_interval(ours, [step])
    here = max((at for at in theirs if at <= step), default=0)
    beside = theirs[here] if here in theirs and here >= 0.9 * step else None  # an older one would mislead
    rows = read_rows(folder / "progress.csv") if (folder / "progress.csv").exists() else []
    seconds = max((float(row["time/time_elapsed"]) for row in rows), default=0.0)
    return Line(
        task=job.task,
        variant=job.variant,
        seeds=len(ours),
        step=step,
        mean=float(mean[0]),
        half=float(half[0]),
        published=beside,
        minutes=seconds / 60,
        complete=step >= job.steps,
    )


def _scores(curves: dict[str, dict[str, Curves]]) -> dict[str, dict[str, Interval]]:
    """Over tasks, by the first variant, where every variant has every task."""
    variants = list(dict.fromkeys(name for task in curves.values() for name in task))
    if not variants or any(set(task) != set(variants) for task in curves.values()):
        return {}
    scores, units = normalized_scores(curves, variants, unit=variants[0])
    if min(units.values(), default=0.0) <= 0.0:  # a return that is not positive is no unit
        return {}
    return {name: aggregate(values) for name, values in scores.items()}


def draw(outcome: Outcome, title: str, path: Path) -> None:
    """A picture per task: a variant's mean and interval, its published mean dashed in the same color."""
    figure, axes = figure_of(len(outcome.curves) + bool(outcome.scores))
    for axis, (task, found) in zip(axes, outcome.curves.items(), strict=False):
        until = max(max(curve) for curves in found.values() for curve in curves.values())
        sets: dict[str, tuple[Curves, Curves | None]] = {name: (curves, None) for name, curves in found.items()}
        twins = {}
        for name, means in outcome.published.get(task, {}).items():
            beside = {step: value for step, value in means.items() if step <= until}
            if beside:
                twins[f"{name}, published"] = name
                sets[f"{name}, published"] = ({"mean": beside}, None)
        draw_curves(axis, sets, task, twins=twins)
    if outcome.scores:
        draw_aggregates(axes[len(outcome.curves)], outcome.scores)
    figure.suptitle(title)
    save_figure(figure, path)


def write_table(outcome: Outcome, path: Path) -> None:
    """The table as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(Line.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(line) for line in outcome.lines)


def table(outcome: Outcome) -> str:
    """The table as text."""
    width = max((len(line.task) for line in outcome.lines), default=0)
    rows = [
        f"{'task':<{width}}  {'variant':<22} {'seeds':>5} {'step':>8}  {'return [95% interval]':<29}  {'published':>9} "
        f"{'minutes':>8}"
    ]
    for line in outcome.lines:
        beside = "" if line.published is None else f"{line.published:.1f}"
        interval = f"[{line.mean - line.half:.1f}, {line.mean + line.half:.1f}]" if line.seeds > 1 else ""
        rows.append(
            f"{line.task:<{width}}  {line.variant:<22} {line.seeds:>5} {line.step:>8}  "
            f"{line.mean:>9.1f} {interval:<19}  {beside:>9} {line.minutes:>8.1f}"
            f"{'' if line.complete else '  (not complete)'}"
        )
    for name, found in outcome.scores.items():
        scores = ", ".join(f"{what} {x.value:.2f} [{x.low:.2f}, {x.high:.2f}]" for what, x in found.items())
        rows.append(f"over tasks, {name}: {scores}")
    return "\n".join(rows)


def as_json(outcome: Outcome) -> str:
    """The table as JSON."""
    scores = {name: {what: asdict(x) for what, x in found.items()} for name, found in outcome.scores.items()}
    return json.dumps({"runs": [asdict(line) for line in outcome.lines], "over_tasks": scores})
