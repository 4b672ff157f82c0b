"""What writing a checkpoint costs, with few and with many stored transitions.

    python benchmarks/checkpoints.py [--preset light] [--seeds 8] [--json]

Writes checkpoints of an untrained agent with the sizes of HalfCheetah whose replay holds 10,000, 100,000 and 1,000,000
transitions, as a run does after each iteration of 1,000 steps: `held up` is how long the run waits, `written` how long
until everything is safely on the disk, beside the run.
"""

import argparse
import dataclasses
import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from doublehorizon.algorithm.devices import find_devices, using
from doublehorizon.config import LoopConfig
from doublehorizon.envs.make import describe, make
from doublehorizon.presets import preset
from doublehorizon.run import checkpoint_writer
from doublehorizon.run.progress import begin
from doublehorizon.run.replay_files import Archived

STORED = (10_000, 100_000, 1_000_000)
REPEATS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="dhmbpo")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    config = dataclasses.replace(preset(options.preset), loop=LoopConfig(steps_per_iteration=1000, checkpoint_every=1))
    spec, devices = describe(make("paper/HalfCheetah"), config), find_devices(None, options.seeds)
    found = {}
    with using(devices), tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        progress = begin(config, spec, list(range(options.seeds)), max(STORED) + 1000, devices)
        for stored in STORED:
            found[stored] = measure(progress, stored, Path(scratch) / str(stored))
    if options.json:
        print(json.dumps({"preset": options.preset, "seeds": options.seeds, "checkpoints": found}, indent=1))
        return
    print(f"{options.preset}, {options.seeds} seed(s), {devices[0].device_kind}: medians of {REPEATS}")
    for stored, row in found.items():
        print(
            f"  {stored:>9} stored: held up {row['held_up_ms']:6.1f} ms, written {row['written_ms']:7.1f} ms, "
            f"{row['megabytes']:.1f} MB"
        )


def measure(progress, stored: int, folder: Path) -> dict[str, float]:
    """Milliseconds, medians, of checkpoints that each add an iteration's rows."""
    folder.mkdir()
    held_up, written, size = [], [], 0
    for repeat in range(REPEATS + 1):
        state = progress.update(iteration=stored // 1000)
        # what was stored before is taken to be on the disk
        progress.machinery.archived = Archived(stored - 1000, "00" * 32)
        writer = checkpoint_writer.CheckpointWriter(folder, progress)
        begun = time.perf_counter()
        writer.write(state)
        waited = time.perf_counter()
        writer.finish()
        done = time.perf_counter()
        if repeat > 0:  # the first compiles
            held_up.append(waited - begun)
            written.append(done - begun)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        writer.write_last(progress.state)
        shutil.rmtree(folder / "checkpoints")
    return {
        "held_up_ms": 1e3 * float(np.median(held_up)),
        "written_ms": 1e3 * float(np.median(written)),
        "megabytes": size / 1e6,
    }


if __name__ == "__main__":
    main()
