"""Settings and fixtures of all tests.

Nearly all of a test's time is compilation. So tests use one tiny config with one set of shapes (`worlds.TINY`), files
whose runs share programs are one worker's, and environments run in the tests' own process unless processes are what
is tested (`pytestmark = pytest.mark.processes`).
"""

import ctypes
import gc
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUICK_FLAG = "--xla_cpu_use_fusion_emitters=false"  # halves the time of a compilation
PROBE = [sys.executable, "-c", "import jax; jax.devices()"]
MOST_MEMORY = 1.1e9  # bytes; a tiny run's programs have 200 MB

# files whose runs share programs, in the order in which they run
RUNS = [
    *("checkpoints", "damage", "bad_folders", "api", "best_policy", "people", "saved_agent", "another_env", "mistakes"),
    *("training_returns", "divergence", "agent", "analyses", "docs", "experiments", "replay_forward", "relatives"),
    *("named_runs", "own_data_and_controllers", "task_rules", "any_env"),
]
FIRST = ("runs", "kills", "cli", "workers")  # groups that take longest begin first


def _use_quick_compilation() -> None:
    """Set what makes compilation quick, for all processes that are started from here."""
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(_cache_folder()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "MALLOC_ARENA_MAX": "2",  # what the compiler's threads free is used again
    }
    flags = os.environ.get("XLA_FLAGS", "")
    quick = os.environ | {"XLA_FLAGS": f"{flags} {QUICK_FLAG}".strip()}
    # a version of XLA that does not know the flag would end the process, so another process tries it
    if QUICK_FLAG not in flags and not subprocess.run(PROBE, env=quick, capture_output=True).returncode:
        os.environ |= quick


def _cache_folder() -> Path:
    """Where compiled programs are kept for the next test run, or for this one if nothing can be written there."""
    folder = ROOT / ".jax_cache"
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="doublehorizon-tests-"))


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # its workers inherit what is set
        _use_quick_compilation()
    import jax  # not above: it reads what was set

    assert jax.config.jax_numpy_rank_promotion == "raise", "something has imported JAX before"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def group(item: pytest.Item) -> str:
        name = item.path.stem.removeprefix("test_")
        return "runs" if name in RUNS else name

    def place(item: pytest.Item) -> tuple[int, int]:
        name = item.path.stem.removeprefix("test_")
        return FIRST.index(group(item)) if group(item) in FIRST else len(FIRST), RUNS.index(name) if name in RUNS else 0

    items.sort(key=place)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))


def pytest_terminal_summary(terminalreporter) -> None:
    """Print how each test that failed is run alone."""
    for report in (*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())):
        command = shlex.join([os.path.relpath(sys.executable), "-m", "pytest", report.nodeid])
        terminalreporter.write_line(f"to repeat it: {command}")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def only_collecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """For runs that end before their first fit: nothing is compiled."""
    monkeypatch.setattr("doublehorizon.training.train.Programs", lambda progress: None)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a run warns of. Python's own recorder of warnings is not safe with the thread that compiles."""
    from doublehorizon.training.live_view import View

    lines = []
    monkeypatch.setattr(View, "warn", lambda self, line: lines.append(line))
    return lines


@pytest.fixture(scope="session")
def traced_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Counter[str]]:
    """A run of 100 steps with its last checkpoints at 60, 80 and 100, and how often each function was traced."""
    import jax

    import doublehorizon as dh
    from worlds import TINY

    traced: Counter[str] = Counter()

    def count(event: str, seconds: float, **about: str) -> None:
        if event.endswith("jaxpr_trace_duration"):
            traced[about["fun_name"]] += 1

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(count)
    folder = tmp_path_factory.mktemp("run") / "run"
    with pytest.MonkeyPatch.context() as patch:
        _stay_in_this_process(patch)
        dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY).learn(100, out=folder)
    return folder, traced.copy()


@pytest.fixture(scope="session")
def run(traced_run: tuple[Path, Counter[str]]) -> Path:
    """The run; leave it as it is."""
    return traced_run[0]


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """The same, to do with as one likes."""
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture(autouse=True, scope="module")
def workers_in_this_process(request: pytest.FixtureRequest):
    """Environments run in this process, which saves the start of three others for each run."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("processes") is None:
            _stay_in_this_process(patch)
        yield


def _stay_in_this_process(patch: pytest.MonkeyPatch) -> None:
    from doublehorizon.acting import workers
    from doublehorizon.acting.env_runner import RunnerGroup

    def start(self, spec, collectors, evaluators):
        for group, ids in ((collectors, self._runner_ids), (evaluators, [(seed, 0) for seed in self.seeds])):
            group.append(workers._LocalWorker(RunnerGroup(spec), ids))

    patch.setattr(workers.WorkerPool, "_start_workers", start)


@pytest.fixture(autouse=True)
def room_for_programs():
    """Compiled programs are dropped where this process has become large."""
    yield
    sizes = Path("/proc/self/statm")
    if sizes.exists() and int(sizes.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") > MOST_MEMORY:
        import jax

        jax.clear_caches()
        gc.collect()
        with suppress(OSError, AttributeError):  # glibc keeps what is freed unless it is asked
            ctypes.CDLL("libc.so.6").malloc_trim(0)
