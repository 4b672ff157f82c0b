"""What came of an experiment: a table of final returns, and a figure with published curves beside our own."""

import csv
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from doublehorizon.analysis.aggregate import Interval, Scores, aggregate
from doublehorizon.analysis.curves import Curves, common_steps, mean_and_interval, read_curves
from doublehorizon.analysis.figures import COLORS, draw_aggregates, figure_of, save_figure
from doublehorizon.jobs import Job
from doublehorizon.runs import read_rows
from doublehorizon.studies import Study


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


def gather(jobs: list[Job], root: Path, study: Study, reference: Path | None) -> Outcome:
    """Reads all runs that have been tested at least once."""
    curves: dict[str, dict[str, Curves]] = {}
    published: dict[str, dict[str, dict[int, float]]] = {}
    lines = []
    for job in jobs:
        path = root / job.name / "eval.csv"
        if not path.exists() or not read_rows(path):
            continue
        ours = read_curves(path)
        theirs = _published(reference, study.variants[job.variant].published, job.task)
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
    """Returns at the last step that all variants have, by those of the first, where every variant has every task."""
    variants = list(dict.fromkeys(name for task in curves.values() for name in task))
    if len(curves) < 2 or any(set(task) != set(variants) for task in curves.values()):
        return {}
    scores: dict[str, Scores] = {variant: {} for variant in variants}
    for task, found in curves.items():
        step = max(set.intersection(*(set(common_steps(runs)) for runs in found.values())))
        last = {name: np.array([curve[step] for curve in runs.values()]) for name, runs in found.items()}
        unit = float(np.mean(last[variants[0]]))
        if unit <= 0:
            return {}
        for name, values in last.items():
            scores[name][task] = values / unit
    return {name: aggregate(values) for name, values in scores.items()}


def draw(outcome: Outcome, title: str, path: Path) -> None:
    """A picture per task: a variant's mean and interval, its published mean dashed in the same color."""
    figure, axes = figure_of(len(outcome.curves) + bool(outcome.scores))
    for axis, (task, found) in zip(axes, outcome.curves.items(), strict=False):
        until = max(max(curve) for curves in found.values() for curve in curves.values())
        for color, (name, curves) in zip(COLORS * 2, found.items(), strict=False):
            steps = common_steps(curves)
            mean, half = mean_and_interval(curves, steps)
            axis.plot(steps, mean, color=color, label=f"{name} ({len(curves)} seeds)")
            axis.fill_between(steps, mean - half, mean + half, color=color, alpha=0.2, linewidth=0)
            beside = {s: x for s, x in outcome.published.get(task, {}).get(name, {}).items() if s <= until}
            if beside:
                axis.plot(list(beside), list(beside.values()), "--", color=color, label=f"{name}, published")
        axis.set(title=task, xlabel="simulator steps", ylabel="test return")
        axis.legend(fontsize="x-small")
        axis.grid(alpha=0.3)
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


def words(outcome: Outcome) -> str:
    """The table, to be read."""
    width = max((len(line.task) for line in outcome.lines), default=0)
    rows = [
        f"{'task':<{width}}  {'variant':<22} {'seeds':>5} {'step':>8}  {'return':>18}  {'published':>9} {'minutes':>8}"
    ]
    for line in outcome.lines:
        beside = "" if line.published is None else f"{line.published:.1f}"
        spread = f"+- {line.half:.1f}" if line.seeds > 1 else ""
        rows.append(
            f"{line.task:<{width}}  {line.variant:<22} {line.seeds:>5} {line.step:>8}  {line.mean:>9.1f} {spread:<9}  "
            f"{beside:>9} {line.minutes:>8.1f}{'' if line.complete else '  (not complete)'}"
        )
    for name, found in outcome.scores.items():
        told = ", ".join(f"{what} {x.value:.2f} [{x.low:.2f}, {x.high:.2f}]" for what, x in found.items())
        rows.append(f"over tasks, {name}: {told}")
    return "\n".join(rows)


def plain(outcome: Outcome) -> str:
    """The table as JSON."""
    scores = {name: {what: asdict(x) for what, x in found.items()} for name, found in outcome.scores.items()}
    return json.dumps({"runs": [asdict(line) for line in outcome.lines], "over_tasks": scores})
