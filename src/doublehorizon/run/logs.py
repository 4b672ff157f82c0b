"""A run's figures as text, `eval.csv` and `progress.csv`; the same figures go to its trackers."""

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from doublehorizon.atomic_files import disk_errors_reported
from doublehorizon.errors import UserError
from doublehorizon.run.trackers import Tracker


class CsvLog:
    """Appends rows to a file; the first row decides the columns. `size` is how many bytes of an earlier log to keep:
    what comes after them was written after the run's last checkpoint. Without a path nothing is written."""

    def __init__(self, path: Path | None, columns: list[str] | None = None, size: int = 0):
        self._path, self._columns = path, columns
        self.lost = 0
        """Bytes that should be there and are not."""
        if path is None:
            return
        with disk_errors_reported(path):
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
        with disk_errors_reported(self._path):
            return self._path.stat().st_size

    def _cut(self, path: Path, size: int) -> int:
        with path.open("ab") as file:
            found = file.seek(0, os.SEEK_END)
            file.truncate(min(size, found))
        return size - min(size, found)

    def _write_row(self, values: list) -> None:
        if self._path is None:
            return
        with disk_errors_reported(self._path), self._path.open("r+", newline="") as file:  # never makes a file anew
            file.seek(0, os.SEEK_END)
            csv.writer(file).writerow([f"{v:.9g}" if isinstance(v, float) else v for v in values])


def _header(path: Path) -> list[str] | None:
    try:
        with path.open(newline="") as file:
            return next(csv.reader(file), None)
    except (ValueError, csv.Error) as problem:
        raise UserError(f"{path} is damaged ({problem}). Remove it: the run goes on without its rows.") from problem


class RunLogs:
    """The two logs of a run, `progress.csv` and `eval.csv`, and its trackers. Without a folder their sizes stay what
    they were."""

    def __init__(self, folder: Path | None, sizes: Mapping[str, int], trackers: Sequence[Tracker] = ()):
        def log(name: str, columns: list[str] | None = None) -> CsvLog:
            return CsvLog(folder and folder / name, columns, sizes.get(name, 0))

        self._sizes, self._trackers = None if folder else dict(sizes), trackers
        self._progress = log("progress.csv")
        self._evaluation = log("eval.csv", ["step", "time", "reward", "seed"])

    @property
    def lost(self) -> int:
        """Bytes that should be there and are not."""
        return self._progress.lost + self._evaluation.lost

    def progress(self, step: int, iteration: int, seed: int, figures: Mapping[str, float | int]) -> None:
        """A seed's figures of an iteration."""
        self._progress.append({"time/total_timesteps": step, "time/iterations": iteration, "seed": seed, **figures})
        for tracker in self._trackers:
            tracker.track(step, seed, figures)

    def evaluation(self, step: int, seconds: float, reward: float, seed: int) -> None:
        """A seed's test return."""
        self._evaluation.append({"step": step, "time": seconds, "reward": reward, "seed": seed})
        for tracker in self._trackers:
            tracker.track(step, seed, {"eval/mean_reward": reward})

    def sizes(self) -> dict[str, int]:
        if self._sizes is not None:
            return self._sizes
        return {"progress.csv": self._progress.size, "eval.csv": self._evaluation.size}
