"""How runs on the disk compare."""

from pathlib import Path

from doublehorizon.run import checkpoint_writer


def differences(one: Path, other: Path) -> list[str]:
    """Files of two runs that differ: their curves, but for times, their last checkpoints and their best policies."""
    found = [name for name in ("eval.csv", "progress.csv") if without_times(one / name) != without_times(other / name)]
    step = checkpoint_writer.steps_kept(one)[-1]
    for name in (f"checkpoints/{step}/state.safetensors", "policy/best.safetensors"):
        if not (other / name).exists() or (one / name).read_bytes() != (other / name).read_bytes():
            found.append(str(other / name))
    return found


def without_times(path: Path) -> list[list[str]]:
    header, *rows = [line.split(",") for line in path.read_text().splitlines()]
    kept = [i for i, name in enumerate(header) if not name.startswith("time") or name == "time/total_timesteps"]
    return [[row[i] for i in kept] for row in (header, *rows)]
