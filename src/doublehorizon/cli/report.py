"""`doublehorizon report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from doublehorizon.analysis.report import write_report
from doublehorizon.cli.options import PathIfGiven
from doublehorizon.cli.parsing import parse
from doublehorizon.errors import UserError

_EXAMPLES = """Writes one HTML page about one or several runs: curves that can be zoomed and read off, final returns,
the model's error, where the time went, configuration, and videos if there are any (doublehorizon video).

examples:
  doublehorizon report runs/hopper                      # runs/hopper/report.html
  doublehorizon report runs/hopper runs/hopper-light --out both.html
  doublehorizon report runs/hopper --reference published/gym/esvg

The page opens anywhere, without a network."""


@dataclass
class Report:
    """What `doublehorizon report` takes."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folders."""
    out: PathIfGiven = None
    """The page. Default: report.html in the first run folder."""
    reference: PathIfGiven = None
    """A folder with published curves, one CSV file per task."""


def run(arguments: list[str]) -> int:
    """Parses, writes, and names the page."""
    options = parse(Report, "report", _EXAMPLES, arguments)
    if not options.runs:
        raise UserError("there is nothing to report on: give at least one run folder.")
    out = options.out or options.runs[0] / "report.html"
    write_report(list(options.runs), out, options.reference)
    print(out)
    return 0
