"""Measure what the tests cost: CPU seconds per file and per cause, compiled programs, memory.

    python benchmarks/test_costs.py                     # as `make test` runs them, with an empty compilation cache
    python benchmarks/test_costs.py tests/test_api.py   # any arguments of pytest; -n 0 for one process
    python benchmarks/test_costs.py --json costs.json

It runs pytest with itself as a plugin. `children` are the processes that tests start and wait for. Compilation is
measured in the tests' own process; it may use several threads, so its CPU share can be larger than its seconds.
"""

import argparse
import builtins
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEFAULT = ["-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder", "-q"]
CAUSES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
COMPILED = "/jax/core/compile/backend_compile_duration"  # counts those that are loaded from the cache, too
COLUMNS = ("wall", "cpu", "children", "import", "trace", "lower", "compile", "programs", "loaded", "tests")


class Recorder:
    """The pytest plugin: adds what happens in this process to the test file that is running."""

    def __init__(self, folder: Path):
        self.path = folder / f"{os.getpid()}.json"
        self.files: dict[str, Counter] = defaultdict(Counter)
        self.memory: list[tuple[float, str, float]] = []
        self.file = "(start and collection)"
        self.begun = time.monotonic()
        self.last = self._now()
        self._listen()
        self._time_imports()

    def _now(self) -> tuple[float, float, float]:
        return time.monotonic(), time.process_time(), _cpu(resource.RUSAGE_CHILDREN)

    def settle(self, next_file: str) -> None:
        """Book the time since the last call to the file that was running."""
        now = self._now()
        for name, before, after in zip(("wall", "cpu", "children"), self.last, now, strict=True):
            self.files[self.file][name] += after - before  # type: ignore[assignment]
        if next_file != self.file:
            self.memory.append((now[0] - self.begun, self.file, _resident()))
        self.file, self.last = next_file, now

    def _listen(self) -> None:
        import jax

        def on_duration(event: str, seconds: float, **_: object) -> None:
            if event in CAUSES:
                self.files[self.file][CAUSES[event]] += seconds  # type: ignore[assignment]
            self.files[self.file]["programs"] += event == COMPILED

        def on_event(event: str, **_: object) -> None:
            if event == "/jax/compilation_cache/cache_hits":
                self.files[self.file].update(loaded=1, programs=-1)

        jax.monitoring.register_event_duration_secs_listener(on_duration)
        jax.monitoring.register_event_listener(on_event)

    def _time_imports(self) -> None:
        plain, depth = builtins.__import__, [0]

        def timed(*arguments, **named):
            if depth[0]:
                return plain(*arguments, **named)
            depth[0], begun = 1, time.thread_time()
            try:
                return plain(*arguments, **named)
            finally:
                depth[0] = 0
                self.files[self.file]["import"] += time.thread_time() - begun  # type: ignore[assignment]

        builtins.__import__ = timed

    def pytest_runtest_setup(self, item) -> None:
        self.settle(item.path.name)
        self.files[self.file]["tests"] += 1

    def pytest_sessionfinish(self) -> None:
        self.settle("(end)")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        self.path.write_text(json.dumps({"files": self.files, "memory": self.memory, "peak": peak}))


def pytest_configure(config) -> None:
    """Record in the processes that run tests, not in the one that hands them out."""
    folder = os.environ.get("TEST_COSTS")
    if folder and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Recorder(Path(folder)))


def measure(arguments: list[str]) -> dict:
    """Run pytest with an empty compilation cache; return its costs."""
    with tempfile.TemporaryDirectory(prefix="test-costs-") as name:
        folder = Path(name)
        (folder / "costs").mkdir()
        environ = os.environ | {
            "TEST_COSTS": str(folder / "costs"),
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "XDG_CACHE_HOME": str(folder / "user"),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        begun = time.monotonic()
        status = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, *arguments], cwd=ROOT, env=environ
        ).returncode
        seconds = time.monotonic() - begun
        workers = [json.loads(path.read_text()) for path in sorted((folder / "costs").iterdir())]
    files: dict[str, Counter] = defaultdict(Counter)
    for worker in workers:
        for file, costs in worker["files"].items():
            files[file].update(costs)
    return {
        "status": status,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "wall_seconds": seconds,
        "cpu_seconds": _cpu(resource.RUSAGE_CHILDREN),
        "largest_process_gb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6,
        "programs": sum(costs["programs"] for costs in files.values()),
        "workers": [{"peak_gb": worker["peak"], "resident_gb": worker["memory"]} for worker in workers],
        "files": files,
    }


def table(costs: dict) -> str:
    """The costs, the dearest file first."""
    lines = [f"{'':32}" + "".join(f"{name:>9}" for name in COLUMNS)]
    files = sorted(costs["files"].items(), key=lambda row: -row[1]["cpu"] - row[1]["children"])
    total: Counter = sum((Counter(row) for _, row in files), Counter())
    lines += [f"{file:32}" + "".join(f"{row.get(name, 0):9.4g}" for name in COLUMNS) for file, row in files]
    lines += [f"{'all':32}" + "".join(f"{total[name]:9.4g}" for name in COLUMNS), ""]
    for number, worker in enumerate(costs["workers"]):
        grown = [f"{gb:.1f}" for _, _, gb in worker["resident_gb"][:: max(len(worker["resident_gb"]) // 10, 1)]]
        lines.append(f"worker {number}: peak {worker['peak_gb']:.1f} GB; over time {' '.join(grown)}")
    lines.append(
        f"{costs['wall_seconds']:.0f} s, {costs['cpu_seconds']:.0f} CPU s, "
        f"largest process {costs['largest_process_gb']:.1f} GB, {costs['programs']} programs; "
        f"{costs['processor']}, {costs['cores']} cores, Python {costs['python']}"
    )
    return "\n".join(lines)


def _cpu(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e9


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options, arguments = parser.parse_known_args()
    costs = measure(arguments or DEFAULT)
    print(table(costs))
    if options.json:
        options.json.write_text(json.dumps(costs, indent=1))
    return costs["status"]


if __name__ == "__main__":
    sys.exit(main())
