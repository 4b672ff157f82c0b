"""`doublehorizon plot`."""

import csv
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from doublehorizon.analysis.aggregate import Interval, Scores, aggregate, profile
from doublehorizon.analysis.curves import (
    Curves,
    common_steps,
    find_curves,
    joined,
    mean_and_interval,
    normalized_scores,
    task_of,
)
from doublehorizon.analysis.figures import draw_aggregates, draw_curves, draw_profiles, figure_of, save_figure
from doublehorizon.cli.options import IntIfGiven, PathIfGiven
from doublehorizon.cli.parsing import parse
from doublehorizon.errors import UserError

_EXAMPLES = """Draws learning curves: mean and 95% interval over seeds, one picture per task.

examples:
  doublehorizon plot runs/hopper
  doublehorizon plot default=runs/hopper light=runs/hopper-light --out hopper.svg
  doublehorizon plot runs/gym --reference published=FOLDER        # a folder of runs, and published curves
  doublehorizon plot no-dr=runs/no-dr sac=runs/sac --reference no-dr=FOLDER sac=FOLDER    # each beside its own, dashed
  doublehorizon plot runs/hopper --x time --csv hopper.csv

A path is a run folder, a folder of runs, or a CSV file with the columns step,reward,seed (and time). Paths with the
same label are one method; several runs of one task must have other seeds. With several tasks the figure ends with IQM,
median and mean over tasks and a profile."""


@dataclass
class Plot:
    """What `doublehorizon plot` takes."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[LABEL=]PATH")]
    """What to draw."""
    reference: tuple[str, ...] = ()
    """[LABEL=]FOLDER with published curves, one CSV file per task. With the label of a run: dashed, in its color."""
    out: Path = Path("curves.png")
    """The figure: .png, .svg or .pdf."""
    x: Literal["steps", "time"] = "steps"
    """What the curves are drawn against."""
    until: IntIfGiven = None
    """The last step to draw. Default: the last that the runs have."""
    csv: PathIfGiven = None
    """Also write the curves' means and intervals into this file."""
    json: bool = False
    """Print the last returns, and the scores over tasks, as JSON."""


Sets = dict[str, dict[str, tuple[Curves, Curves | None]]]
"""Curves, with their times, by task and label."""


def run(arguments: list[str]) -> int:
    """Parses, draws, and prints the last returns."""
    options = parse(Plot, "plot", _EXAMPLES, arguments)
    if not options.runs:
        raise UserError("there is nothing to draw: give at least one run folder.")
    sets, references = _collect(options)
    until = options.until or max(common_steps(_first(task))[-1] for task in sets.values())
    scores = _scores(sets, until, references)
    _draw(options, sets, until, scores, references)
    if options.csv is not None:
        _write_csv(sets, until, options.csv)
    print(json.dumps(_summary(sets, until, scores, options.out)) if options.json else _words(sets, until, scores))
    if not options.json:
        print(options.out)
    return 0


def _first(task: dict[str, tuple[Curves, Curves | None]]) -> Curves:
    return next(iter(task.values()))[0]


def _collect(options: Plot) -> tuple[Sets, dict[str, str | None]]:
    """All curves; and which of the labels are references, with the label of the runs that one is beside, if any."""
    sets: Sets = {}
    with_times = options.x == "time"
    for text in options.runs:
        label, path = _labelled(text)
        for folder in _run_folders(path):
            _add(sets.setdefault(task_of(folder) or folder.stem, {}), label, _read(folder, None, with_times))
    methods = {label for task in sets.values() for label in task}
    references: dict[str, str | None] = {}
    for text in options.reference:
        label, path = _labelled(text)
        name = f"{label}, reference" if label in methods else label
        references[name] = label if label in methods else None
        for task, place in sets.items():
            if label in place or label not in methods:
                _add(place, name, _read(path, task, with_times))
    return sets, references


def _read(path: Path, task: str | None, with_times: bool) -> tuple[Curves, Curves | None]:
    return find_curves(path, task), find_curves(path, task, "time") if with_times else None


def _add(place: dict[str, tuple[Curves, Curves | None]], label: str, found: tuple[Curves, Curves | None]) -> None:
    """More seeds of a method that is there already are added to it."""
    if label in place:
        (curves, times), (more, more_times) = place[label], found
        try:
            found = joined(curves, more), None if times is None else joined(times, more_times or {})
        except UserError as problem:
            raise UserError(f"label {label!r}: {problem} Give them labels of their own: LABEL=PATH.") from problem
    place[label] = found


def _labelled(text: str) -> tuple[str, Path]:
    label, separator, path = text.partition("=")
    if separator and not Path(text).exists():
        return label, Path(path)
    return Path(text).resolve().name, Path(text)


def _run_folders(path: Path) -> list[Path]:
    """A run folder or file itself; else the runs inside."""
    if path.is_file() or (path / "eval.csv").is_file():
        return [path]
    found = sorted(file.parent for file in path.rglob("eval.csv"))
    if not found:
        raise UserError(f"{path} holds no run (no eval.csv). Give a run folder, a folder of runs, or a CSV file.")
    return found


def _scores(sets: Sets, until: int, references: dict[str, str | None]) -> dict[str, Scores]:
    """Scores of the methods that every task has, in units of the first reference's mean, or of the last method's where
    there is no reference. One alone has nothing to be measured by."""
    labels = [label for label in next(iter(sets.values())) if all(label in task for task in sets.values())]
    if len(labels) < 2:
        return {}
    unit = next((label for label in references if label in labels), labels[-1])
    curves = {task: {label: methods[label][0] for label in labels} for task, methods in sets.items()}
    found, _ = normalized_scores(curves, labels, unit, until)
    return {label: scores for label, scores in found.items() if not references.get(label)}


def _draw(options: Plot, sets: Sets, until: int, scores: dict[str, Scores], references: dict[str, str | None]) -> None:
    figure, axes = figure_of(len(sets) + (2 if scores else 0))
    twins = {label: beside for label, beside in references.items() if beside is not None}
    for axis, (task, methods) in zip(axes, sets.items(), strict=False):
        draw_curves(axis, methods, task, until, twins)
    if scores:
        highest = max(float(np.max(runs)) for method in scores.values() for runs in method.values())
        taus = np.linspace(0.0, highest, 101)
        draw_aggregates(axes[len(sets)], {label: aggregate(method) for label, method in scores.items()})
        draw_profiles(axes[len(sets) + 1], taus, {label: profile(method, taus) for label, method in scores.items()})
    save_figure(figure, options.out)


def _write_csv(sets: Sets, until: int, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["task", "label", "step", "mean", "low", "high", "seeds"])
            for task, methods in sets.items():
                for label, (curves, _) in methods.items():
                    steps = common_steps(curves, until)
                    mean, half = mean_and_interval(curves, steps)
                    for step, value, spread in zip(steps, mean, half, strict=True):
                        writer.writerow([task, label, step, value, value - spread, value + spread, len(curves)])
    except OSError as problem:
        raise UserError(f"{path} cannot be written: {problem.strerror}.") from problem


def _last(curves: Curves, until: int) -> tuple[int, Interval]:
    step = common_steps(curves, until)[-1]
    mean, half = mean_and_interval(curves, [step])
    return step, Interval(float(mean[0]), float(mean[0] - half[0]), float(mean[0] + half[0]))


def _summary(sets: Sets, until: int, scores: dict[str, Scores], out: Path) -> dict:
    return {
        "figure": str(out),
        "last": {
            task: {label: {"step": _last(c, until)[0], **asdict(_last(c, until)[1])} for label, (c, _) in m.items()}
            for task, m in sets.items()
        },
        "over_tasks": {
            label: {name: asdict(value) for name, value in aggregate(method).items()}
            for label, method in scores.items()
        },
    }


def _words(sets: Sets, until: int, scores: dict[str, Scores]) -> str:
    lines = []
    for task, methods in sets.items():
        for label, (curves, _) in methods.items():
            step, last = _last(curves, until)
            interval = f"[{last.low:.1f}, {last.high:.1f}]" if len(curves) > 1 else "(one seed)"
            lines.append(f"{task}  {label}: {last.value:.1f} {interval} at {step}")
    for label, method in scores.items():
        found = "  ".join(f"{n} {v.value:.3f} [{v.low:.3f}, {v.high:.3f}]" for n, v in aggregate(method).items())
        lines.append(f"all tasks  {label}: {found}")
    return "\n".join(lines)
