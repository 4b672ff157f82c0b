"""What a run leaves behind as text: `eval.csv` and `progress.csv`; and the live view of it."""

import csv
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)


class CsvLog:
    """Appends rows to a file; the first row decides the columns. Without a path it only forgets."""

    def __init__(self, path: Path | None, columns: list[str] | None = None):
        self._path, self._columns = path, columns
        if path is not None and path.exists() and path.stat().st_size:
            with path.open(newline="") as file:
                self._columns = next(csv.reader(file))
        elif columns is not None:
            self._write_row(columns)

    def append(self, row: Mapping[str, object]) -> None:
        if self._columns is None:
            self._columns = list(row)
            self._write_row(self._columns)
        self._write_row([row[name] for name in self._columns])

    def _write_row(self, values: list) -> None:
        if self._path is None:
            return
        with self._path.open("a", newline="") as file:
            csv.writer(file).writerow([f"{v:.9g}" if isinstance(v, float) else v for v in values])


class View:
    """A progress bar on a terminal, plain lines elsewhere, nothing if `quiet`."""

    def __init__(self, name: str, total_steps: int, quiet: bool = False):
        self._quiet, self._total, self._name = quiet, total_steps, name
        self._console = Console(stderr=True)
        self._live = not quiet and self._console.is_terminal
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[news]}"),
            console=self._console,
            disable=not self._live,
            speed_estimate_period=3600,
        )
        self._bar = self._progress.add_task(name, total=total_steps, rate="", news="starting")
        self._news, self._returns = "starting", ""
        self._begun = time.monotonic()
        self._first_step = 0

    def __enter__(self) -> "View":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self._progress.console.print(line, highlight=False, soft_wrap=True)
            sys.stderr.flush()

    def begin_at(self, step: int) -> None:
        self._first_step = step
        self._progress.reset(self._bar, completed=step)

    def phase(self, news: str) -> None:
        """What is being done now."""
        self._news = news
        self._progress.update(self._bar, news=self._text())

    def advance(self, step: int) -> None:
        """So many environment steps are done; on a file or pipe this is a line of its own."""
        rate = (step - self._first_step) / max(time.monotonic() - self._begun, 1e-9)
        self._progress.update(self._bar, completed=step, rate=f"{rate:.3g} steps/s", news=self._text())
        if not self._live and not self._quiet:
            left = (self._total - step) / max(rate, 1e-9)
            self.say(f"{self._name}  step {step}/{self._total}  {rate:.3g} steps/s  {_clock(left)} left{self._returns}")

    def evaluated(self, step: int, returns: list[float]) -> None:
        """A test return per seed."""
        mean = sum(returns) / len(returns)
        spread = f" ({min(returns):.4g} .. {max(returns):.4g})" if len(returns) > 1 else ""
        self._returns = f"  return {mean:.4g} at {step}"
        self.say(f"{self._name}  step {step}: test return {mean:.5g}{spread}")
        self._progress.update(self._bar, news=self._text())

    def _text(self) -> str:
        return f"{self._news}{self._returns}"


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"
