"""`doublehorizon list`."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from doublehorizon.cli.options import resume_command
from doublehorizon.cli.parsing import parse
from doublehorizon.envs.registry import GROUPS
from doublehorizon.errors import UserError
from doublehorizon.run.run_reader import status_of

_WIDE = 1000  # columns of a pipe or a file, in which nothing is broken

_EXAMPLES = """Lists the tasks that are known here, or the runs in a folder.

examples:
  doublehorizon list              # tasks, with sizes and the paper's steps
  doublehorizon list runs         # runs: how far they are, what they reached, whether they are running"""


@dataclass
class List:
    """What `doublehorizon list` takes."""

    folder: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")] = None
    """A folder in which to look for runs, at any depth. Default: list tasks."""
    json: bool = False
    """Print the list as JSON."""


def run(arguments: list[str]) -> int:
    """Parses and lists."""
    options = parse(List, "list", _EXAMPLES, arguments)
    if options.folder is None:
        _list_tasks(options.json)
    else:
        _list_runs(options.folder, options.json)
    return 0


def _list_tasks(as_json: bool) -> None:
    if as_json:
        print(json.dumps({title: [entry._asdict() for entry in group] for title, group in GROUPS.items()}))
        return
    for title, group in GROUPS.items():
        rows = [
            (entry.name, entry.obs_size, entry.act_size, f"{entry.steps:,}" if entry.steps else "") for entry in group
        ]
        _print_table(title, ("task", "observations", "actions", "steps in the paper"), rows)


def _list_runs(folder: Path, as_json: bool) -> None:
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder. Give one that holds runs, such as runs.")
    found = [status_of(path.parent) for path in sorted(folder.rglob("config.json"))]
    if as_json:
        print(json.dumps([asdict(state) for state in found]))
        return
    if not found:
        print(f"{folder} holds no runs.")
        return
    rows = [
        (
            s.run,
            s.env,
            s.seeds,
            f"{s.step:,}" + (f" of {s.steps:,}" if s.steps else ""),
            _number(s.last_return),
            f"{s.state}; {s.note}" if s.note else s.state,
        )
        for s in found
    ]
    _print_table("", ("run", "task", "seeds", "steps", "last return", "state"), rows)
    for s in found:
        if s.state == "stopped":
            print(_printable(f"go on with: {resume_command(s.run, s.env)}"))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _printable(text: str) -> str:
    """Without control characters, which a terminal would obey."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _print_table(title: str, names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    table = Table(title=title or None, title_justify="left")
    for k, name in enumerate(names):
        is_number = bool(rows) and isinstance(rows[0][k], int)
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_printable(str(value))) for value in row))
    Console(width=None if sys.stdout.isatty() else _WIDE, emoji=False).print(table)
