"""Breaks the algorithm on purpose, one line at a time, and says which of the breaks the tests notice.

    python benchmarks/mutants.py                      # all of them, two at a time
    python benchmarks/mutants.py values updates       # those of some files
    python benchmarks/mutants.py --match stop_gradient
    python benchmarks/mutants.py --list

A mutant is a wrong line in the place of a right one: a sign, a horizon, a mask, an old network instead of a new one.
The tests that guard the file run on a copy of the package with that line. They should fail: the mutant is killed. One
that survives is a test that is missing, or a line that does not matter; the latter carry their explanation here, and it
is an error too if one of these is killed.
"""

import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mutant_tables import TABLES
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """A wrong line in a file, and the test files that guard it."""

    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]
    harmless: str = ""
    """Why no test can notice it, if that is so."""

    @property
    def name(self) -> str:
        line = next(line for line in self.wrong.splitlines() if line not in self.right.splitlines())
        return f"{Path(self.file).stem}: {line.strip()}"


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant."""

    mutant: Mutant
    killed: bool
    killer: str
    seconds: float

    @property
    def state(self) -> str:
        if self.mutant.harmless:
            return "KILLED, THOUGH HARMLESS" if self.killed else "harmless"
        return "killed" if self.killed else "SURVIVED"

    @property
    def as_expected(self) -> bool:
        return self.killed != bool(self.mutant.harmless)


def mutants() -> list[Mutant]:
    """All of the tables, each checked to stand for one place in its file."""
    found = []
    for file, (tests, table) in TABLES.items():
        text = (ROOT / "src" / "doublehorizon" / file).read_text()
        for right, wrong, *why in table:
            if text.count(right) != 1:
                raise SystemExit(f"{file} has {text.count(right)} places that read {right!r}; a mutant needs one.")
            paths = tuple(f"tests/test_{name}.py" for name in tests.split())
            found.append(Mutant(file, right, wrong, paths, *why))
    return found


def attempt(mutant: Mutant) -> Outcome:
    """Runs the tests on a copy of the package with the wrong line."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        path = Path(folder) / "src" / "doublehorizon" / mutant.file
        path.write_text(path.read_text().replace(mutant.right, mutant.wrong))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *mutant.tests],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(Path(folder) / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (0, 1) or (done.returncode == 1 and not failed):
        raise SystemExit(f"the tests of {mutant.name!r} could not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    killer = failed[0].rpartition("::")[2] if failed else ""
    return Outcome(mutant, done.returncode == 1, killer, time.monotonic() - begun)


def run(chosen: list[Mutant], jobs: int) -> Iterator[Outcome]:
    """What became of each, as they are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        task = bar.add_task("mutants", total=len(chosen))
        for done in concurrent.futures.as_completed([pool.submit(attempt, mutant) for mutant in chosen]):
            bar.advance(task)
            yield done.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="names of files, such as values; default: all")
    parser.add_argument("--match", default="", help="only those whose wrong line contains this text")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--list", action="store_true", help="print them, and run none")
    options = parser.parse_args()
    chosen = [m for m in mutants() if not options.files or Path(m.file).stem in options.files]
    chosen = [mutant for mutant in chosen if options.match in mutant.name]
    if options.list:
        print("\n".join(mutant.name for mutant in chosen))
        return 0
    begun, outcomes = time.monotonic(), []
    for outcome in run(chosen, options.jobs):
        outcomes.append(outcome)
        print(f"{outcome.state:<10} {outcome.seconds:5.0f} s  {outcome.mutant.name}")
        print(f"{'':<20}{outcome.killer or outcome.mutant.harmless}", flush=True)
    count = {state: sum(o.state == state for o in outcomes) for state in dict.fromkeys(o.state for o in outcomes)}
    minutes = (time.monotonic() - begun) / 60
    print(f"{len(outcomes)} mutants: {', '.join(f'{n} {state}' for state, n in count.items())}; {minutes:.1f} minutes")
    return 0 if all(outcome.as_expected for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
