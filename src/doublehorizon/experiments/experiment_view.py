"""How several runs stand, in one view: a table on a terminal or in a notebook, a line per change elsewhere."""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from doublehorizon.errors import UserError
from doublehorizon.experiments.jobs import Job
from doublehorizon.run.run_reader import read_rows
from doublehorizon.training.live_view import clock, sparkline

_EVERY = 1.0  # seconds between two reads of the runs' files
_SILENCE = 30.0  # seconds without a line, at most, where lines are printed


@dataclass
class JobStatus:
    """What is known of a job."""

    state: str = "waiting"
    note: str = ""
    step: int = 0
    returns: tuple[float, ...] = ()
    begun: float | None = None
    first: int = 0
    told: float = 0.0


class ExperimentView:
    """Shows jobs whose runs are in folders under `root`."""

    def __init__(self, jobs: list[Job], root: Path, quiet: bool = False, console: Console | None = None):
        self._jobs, self._root, self._quiet = {job.name: job for job in jobs}, root, quiet
        self._console = console or Console(stderr=True, emoji=False)
        self.rows = {name: JobStatus() for name in self._jobs}
        self._is_live = self._console.is_terminal and not quiet
        self._live = Live(self, console=self._console, refresh_per_second=2)
        self._refreshed = 0.0

    def __enter__(self) -> "ExperimentView":
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._live.stop()

    def update(self, name: str, state: str, note: str = "") -> None:
        """The state of a job has changed: running, done, failed, waiting again."""
        row = self.rows[name]
        self._read(name)
        if state == "running":
            row.begun, row.first = time.monotonic(), row.step
        row.state, row.note = state, note
        self._tell(name, note)

    def _tell(self, name: str, *notes: str) -> None:
        """A line about a job, where there is no table."""
        row = self.rows[name]
        row.told = time.monotonic()
        if not self._is_live and not self._quiet:
            parts = [f"{name}: {row.state}", f"step {row.step:,} of {self._jobs[name].steps:,}", *notes]
            self._console.print("  ".join(filter(None, parts)), highlight=False, markup=False, soft_wrap=True)

    def refresh(self) -> None:
        """Reads how far runs are, once a second at most."""
        if time.monotonic() - self._refreshed > _EVERY:
            for name, row in self.rows.items():
                if row.state == "running":
                    self._read_and_tell(name)
            self._refreshed = time.monotonic()

    def _read_and_tell(self, name: str) -> None:
        """Of each new test, and now and then how far it is."""
        row = self.rows[name]
        before = len(row.returns)
        self._read(name)
        if len(row.returns) > before or time.monotonic() - row.told > _SILENCE:
            left = self._left(name)
            last = f"test return {row.returns[-1]:.5g}" if row.returns else ""
            self._tell(name, last, left and f"{left} left")

    def _read(self, name: str) -> None:
        row, folder = self.rows[name], self._root / name
        with suppress(UserError, ValueError, LookupError):  # not there yet, or just being written
            tests: dict[int, list[float]] = {}
            for test in read_rows(folder / "eval.csv"):
                tests.setdefault(int(test["step"]), []).append(float(test["reward"]))
            row.returns = tuple(sum(values) / len(values) for _, values in sorted(tests.items()))
            row.step = max([row.step, *tests])
            row.step = max(row.step, int(read_rows(folder / "progress.csv")[-1]["time/total_timesteps"]))

    def _left(self, name: str) -> str:
        row, steps = self.rows[name], self._jobs[name].steps
        if row.state != "running" or row.begun is None or row.step <= row.first:
            return ""
        return clock((time.monotonic() - row.begun) * (steps - row.step) / (row.step - row.first))

    def __rich__(self) -> Table:
        table = Table("run", "state", "steps", "left", "test return", "")
        styles = {"running": "cyan", "done": "green", "failed": "red"}
        for name, row in self.rows.items():
            last = f"{row.returns[-1]:.5g}" if row.returns else ""
            curve = Text(sparkline(list(row.returns)) if row.returns else "", style="cyan")
            state = Text(row.state, style=styles.get(row.state, "dim"))
            steps = f"{row.step:,} of {self._jobs[name].steps:,}"
            table.add_row(name, state, steps, self._left(name), last, curve if not row.note else Text(row.note))
        return table
