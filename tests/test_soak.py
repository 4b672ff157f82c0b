"""Long runs need no more memory, files or processes than short ones."""

import gc
import os
from pathlib import Path

import pytest

import doublehorizon as dh
from doublehorizon.config import LoopConfig
from worlds import TINY


def resident() -> int:
    """Kilobytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> int:
    return len(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


@pytest.mark.slow
def test_three_hundred_iterations_need_no_more_than_fifty(run_folder, said):
    loop = LoopConfig(
        steps_per_iteration=20, seed_iterations=2, evaluate_every=5, evaluation_episodes=1, checkpoint_every=1
    )
    config = TINY.__class__(**{**TINY.__dict__, "loop": loop})
    seen: dict[int, tuple[int, int, int]] = {}

    def look(progress) -> None:
        if progress.iteration in (50, 300):
            gc.collect()
            seen[progress.iteration] = (resident(), handles(), children())

    dh.DHMBPO("Pendulum-v1", seeds=2, config=config).learn(20 * 300, out=run_folder, callback=look)
    (memory, files, processes), (later, more_files, more_processes) = seen[50], seen[300]
    print(seen)
    assert later <= 1.02 * memory
    assert more_files <= files and more_processes == processes
    assert len(list((run_folder / "checkpoints").iterdir())) == 3
