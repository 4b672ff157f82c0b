"""`doublehorizon compare`."""

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from doublehorizon.analysis.curves import Comparison, Curves, common_steps, compare, find_curves, joined, task_of
from doublehorizon.analysis.figures import plot
from doublehorizon.cli.options import PathIfGiven
from doublehorizon.cli.parsing import parse
from doublehorizon.errors import UserError

_EXAMPLES = """Compares a run with another run, or with published curves: each seed scores its mean return over the
evaluations, and Welch's 95% interval of the difference says whether one is better beyond chance.

examples:
  doublehorizon compare runs/a runs/b
  doublehorizon compare runs/a runs/b --steps 10000 20000 --plot a-and-b.png
  doublehorizon compare runs/hopper --reference published/gym/esvg
  doublehorizon compare runs/hopper runs/hopper-more-seeds --reference published/gym/esvg"""


@dataclass
class Compare:
    """What `doublehorizon compare` takes."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, or a CSV file with the columns step,reward,seed. Two of them are compared with each other; beside
    a reference, several with other seeds are taken together."""
    reference: PathIfGiven = None
    """What to compare with: a run folder, a CSV file, or a folder with a file <Task>.csv. Default: the second RUN."""
    steps: tuple[int, ...] = ()
    """The steps that count. A return between two tests is taken from the line that joins them. Default: all steps at
    which both were tested, but for the one before the first step."""
    plot: PathIfGiven = None
    """Draw both learning curves into this file (PNG, SVG or PDF)."""
    json: bool = False
    """Print the figures as JSON."""


def run(arguments: list[str]) -> int:
    """Status 0 whatever the comparison says; the result is in the output."""
    options = parse(Compare, "compare", _EXAMPLES, arguments)
    runs, reference = _sides(options)
    tasks = [task_of(folder) for folder in runs]
    if len(set(tasks)) > 1:
        raise UserError(f"the runs are of several tasks ({', '.join(map(str, tasks))}): compare those of one task.")
    task = tasks[0]
    ours = functools.reduce(joined, map(find_curves, runs))
    theirs = find_curves(reference, task)
    result = compare(ours, theirs, options.steps or _steps_of_both(ours, theirs))
    names = ("this run", "reference") if options.reference else (str(runs[0]), str(reference))
    if options.plot is not None:
        until = common_steps(ours)[-1]
        plot(dict(zip(names, (ours, theirs), strict=True)), task or runs[0].name, options.plot, until)
    if options.json:
        print(json.dumps(dataclasses.asdict(result) | {"below": result.below, "above": result.above}))
    else:
        print(_words(result, names))
    return 0


def _sides(options: Compare) -> tuple[tuple[Path, ...], Path]:
    """The runs to compare, and what with."""
    if options.reference is not None and options.runs:
        return options.runs, options.reference
    if options.reference is None and len(options.runs) == 2:
        return options.runs[:1], options.runs[1]
    raise UserError(
        f"{len(options.runs)} runs were given{'' if options.reference is None else ' and a reference'}, but two are "
        "needed, or one or more and --reference."
    )


def _steps_of_both(ours: Curves, theirs: Curves) -> tuple[int, ...]:
    steps = sorted(set(common_steps(ours)) & set(common_steps(theirs)) - {0})
    if not steps and max(common_steps(ours)[-1], common_steps(theirs)[-1]) == 0:
        raise UserError("both were tested before the first step alone: train them longer.")
    if not steps:
        raise UserError(
            f"the two were tested at no step that both have: the first at {_some(common_steps(ours))}, the second at "
            f"{_some(common_steps(theirs))}. Name the steps that count: --steps 10000 20000."
        )
    return tuple(steps)


def _some(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) < 8 else f"{', '.join(map(str, steps[:5]))}, ... {steps[-1]}"


def _words(result: Comparison, names: tuple[str, str]) -> str:
    between = ", between two tests on the line that joins them" if result.interpolated else ""
    lines = [f"mean return at {_some(list(result.steps))}{between}; ± is a standard deviation over seeds"]
    width = max(map(len, names))
    for name, scores in zip(names, (result.ours, result.theirs), strict=True):
        each = " ".join(f"{score:.0f}" for score in sorted(scores))
        lines.append(
            f"  {name:<{width}} {np.mean(scores):8.1f} ± {np.std(scores, ddof=1):.1f}  ({len(scores)} seeds: {each})"
        )
    verdict = "above" if result.above else "below" if result.below else "neither above nor below"
    lines.append(
        f"  difference {result.difference:.1f}, 95% interval [{result.low:.1f}, {result.high:.1f}]: "
        f"{names[0]} is {verdict}{',' if result.above or result.below else ''} beyond chance"
    )
    return "\n".join(lines)
