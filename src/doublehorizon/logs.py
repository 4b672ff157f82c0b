"""What a run leaves behind as text: `eval.csv` and `progress.csv`; and the live view of it."""

import csv
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from doublehorizon.durable import told
from doublehorizon.errors import UserError


class CsvLog:
    """Appends rows to a file; the first row decides the columns. `size` is how many bytes of an earlier log to keep:
    what is behind them was written after the run's last checkpoint. Without a path it only forgets."""

    def __init__(self, path: Path | None, columns: list[str] | None = None, size: int = 0):
        self._path, self._columns = path, columns
        self.lost = 0
        """Bytes that should be there and are not."""
        if path is None:
            return
        with told(path):
            self.lost = self._cut(path, size)
            header = _header(path)
        if header is not None:
            self._columns = header
        elif columns is not None:
            self._write_row(columns)

    def append(self, row: Mapping[str, object]) -> None:
        if self._columns is None:
            self._columns = list(row)
            self._write_row(self._columns)
        self._write_row([row.get(name, "") for name in self._columns])

    @property
    def size(self) -> int:
        if self._path is None:
            return 0
        with told(self._path):
            return self._path.stat().st_size

    def _cut(self, path: Path, size: int) -> int:
        with path.open("ab") as file:
            found = file.seek(0, os.SEEK_END)
            file.truncate(min(size, found))
        return size - min(size, found)

    def _write_row(self, values: list) -> None:
        if self._path is None:
            return
        with told(self._path), self._path.open("r+", newline="") as file:  # never makes a file anew
            file.seek(0, os.SEEK_END)
            csv.writer(file).writerow([f"{v:.9g}" if isinstance(v, float) else v for v in values])


def _header(path: Path) -> list[str] | None:
    try:
        with path.open(newline="") as file:
            return next(csv.reader(file), None)
    except (ValueError, csv.Error) as problem:
        raise UserError(f"{path} is damaged ({problem}). Remove it: the run goes on without its rows.") from problem


class RunLogs:
    """The two logs of a run: `progress.csv` and `eval.csv`. Without a folder their sizes stay what they were."""

    def __init__(self, folder: Path | None, sizes: Mapping[str, int]):
        self._sizes = None if folder else dict(sizes)

        def log(name: str, columns: list[str] | None = None) -> CsvLog:
            return CsvLog(folder and folder / name, columns, sizes.get(name, 0))

        self.progress = log("progress.csv")
        self.evaluation = log("eval.csv", ["step", "time", "reward", "seed"])

    def sizes(self) -> dict[str, int]:
        return (
            self._sizes
            if self._sizes is not None
            else {"progress.csv": self.progress.size, "eval.csv": self.evaluation.size}
        )


class View:
    """A progress bar on a terminal, plain lines elsewhere, nothing if `quiet`."""

    def __init__(self, name: str, total_steps: int, quiet: bool = False):
        self._name, self._total, self._quiet = name, total_steps, quiet
        console = Console(stderr=True)
        self._live = console.is_terminal and not quiet
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[news]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not self._live,
        )
        self._bar = self._progress.add_task(name, total=total_steps, left="", news="starting")
        self._news, self._returns = "starting", ""

    def __enter__(self) -> "View":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def warn(self, line: str) -> None:
        """A line that must be seen: a Python warning where nothing is shown."""
        if self._quiet:
            warnings.warn(line, stacklevel=2)
        self.say(line)

    def phase(self, news: str) -> None:
        """What is being done now."""
        self._news = news
        self._show()

    def advance(self, step: int, seconds_left: float | None = None) -> None:
        """So many steps are done, and the rest takes at most so long, if that is known. Where there is no terminal
        this is a line of its own."""
        left = "" if seconds_left is None else f"at most {_clock(seconds_left)} left"
        self._progress.update(self._bar, completed=step, left=left)
        self._show()
        if not self._live:
            self.say("  ".join(filter(None, [f"{self._name}  step {step}/{self._total}", left, self._returns])))

    def estimated(self, seconds: float) -> None:
        """How long the whole run will take, as soon as it can be told."""
        hint = ""
        if seconds > 2 * 3600:
            hint = ". The preset light needs far less time on a CPU; a GPU is faster by two orders of magnitude"
        self.say(f"{self._name}  the whole run takes at most about {_clock(seconds)} here{hint}")

    def evaluated(self, step: int, returns: list[float]) -> None:
        """A test return per seed."""
        mean = sum(returns) / len(returns)
        spread = f" (seeds: {min(returns):.4g} to {max(returns):.4g})" if len(returns) > 1 else ""
        self._returns = f"return {mean:.4g} at {step}"
        self.say(f"{self._name}  step {step}: test return {mean:.5g}{spread}")
        self._show()

    def _show(self) -> None:
        self._progress.update(self._bar, news="  ".join(filter(None, [self._returns, self._news])))


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"
