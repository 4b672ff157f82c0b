"""Test settings: shapes that do not match raise, and programs are compiled once for all test runs."""

import os
import shutil
from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update(
    "jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", os.path.abspath(".jax_cache"))
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_disable_most_optimizations", True)  # nearly all of a test's time is compilation

# each file is one worker's: the longest ones begin first, so that none is left over at the end
LONGEST_FIRST = ("kills", "cli", "agent", "any_env", "divergence", "checkpoints", "analyses", "named_exports")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.stem.removeprefix("test_")
        return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=place)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """What a run warns of. Python's own recorder of warnings is not safe with the thread that compiles."""
    from doublehorizon.training.live_view import View

    lines = []
    monkeypatch.setattr(View, "warn", lambda self, line: lines.append(line))
    return lines


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """A run of 100 steps with its last checkpoints at 60, 80 and 100; leave it as it is."""
    import doublehorizon as dh
    from kept import CONFIG

    folder = tmp_path_factory.mktemp("run") / "run"
    dh.DHMBPO("Pendulum-v1", seeds=2, config=CONFIG).learn(100, out=folder)
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """The same, to do with as one likes."""
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture(autouse=True)
def room_for_programs():
    """All tests run in one process, and each compiles programs."""
    yield
    from doublehorizon.algorithm.devices import (
        forget_programs,  # not above: shapes are checked in what is imported later
    )

    forget_programs(20_000)
