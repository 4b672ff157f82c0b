"""`doublehorizon compare`."""

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from doublehorizon.analysis.curves import Comparison, common_steps, compare, find_curves, joined, task_of
from doublehorizon.analysis.figures import plot
from doublehorizon.errors import UserError

_EXAMPLES = """Compares a run with published curves, or with another run: each seed scores its mean return over
the given evaluations, and Welch's 95% interval of the difference says whether the run is worse beyond chance.

examples:
  doublehorizon compare runs/hopper --reference published/gym/esvg
  doublehorizon compare runs/hopper runs/hopper-more-seeds --reference published/gym/esvg
  doublehorizon compare runs/a --reference runs/b --steps 10000 20000 --plot a-and-b.png"""


@dataclass
class Compare:
    """What `doublehorizon compare` takes."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, or a CSV file with the columns step,reward,seed; several with other seeds are taken together."""
    reference: Path
    """What to compare with: a run folder, a CSV file, or a folder with a file <Task>.csv."""
    steps: tuple[int, ...] = (20_000, 30_000, 40_000, 50_000)
    """The evaluations that count."""
    plot: Path | None = None
    """Draw both learning curves into this file (PNG, SVG or PDF)."""
    json: bool = False
    """Print the figures as JSON."""


def run(arguments: list[str]) -> int:
    """Status 0 whatever the comparison says; the result is in the output."""
    options = tyro.cli(Compare, prog="doublehorizon compare", description=_EXAMPLES, args=arguments)
    if not options.runs:
        raise UserError("there is nothing to compare: give at least one run folder.")
    tasks = [task_of(folder) for folder in options.runs]
    if len(set(tasks)) > 1:
        raise UserError(f"the runs are of several tasks ({', '.join(map(str, tasks))}): compare those of one task.")
    task = tasks[0]
    ours = functools.reduce(joined, map(find_curves, options.runs))
    theirs = find_curves(options.reference, task)
    result = compare(ours, theirs, options.steps)
    if options.plot is not None:
        until = common_steps(ours)[-1]
        plot({"this run": ours, "reference": theirs}, task or options.runs[0].name, options.plot, until)
    print(json.dumps(dataclasses.asdict(result) | {"below": result.below}) if options.json else _words(result))
    return 0


def _words(result: Comparison) -> str:
    lines = [f"mean return over the evaluations at {', '.join(map(str, result.steps))}"]
    for name, scores in (("this run", result.ours), ("reference", result.theirs)):
        each = " ".join(f"{score:.0f}" for score in sorted(scores))
        lines.append(
            f"  {name:<9} {np.mean(scores):8.1f} +- {np.std(scores, ddof=1):.1f}  ({len(scores)} seeds: {each})"
        )
    verdict = "below the reference" if result.below else "not below the reference"
    lines.append(f"  difference {result.difference:.1f}, 95% interval [{result.low:.1f}, {result.high:.1f}]: {verdict}")
    return "\n".join(lines)
