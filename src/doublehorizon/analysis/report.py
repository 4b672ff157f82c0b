"""One page that tells all of some runs: self-contained HTML, which opens anywhere without a network."""

import base64
import json
import math
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from doublehorizon.analysis.curves import common_steps, find_curves, mean_and_interval
from doublehorizon.atomic_files import write_file
from doublehorizon.errors import UserError
from doublehorizon.run.run_reader import NO_GAIN, Run, no_gain, read_rows, read_run

_MODEL = {
    "model/validation_rmse": "model error on steps it was not fitted to (RMSE, normalised)",
    "model/epochs": "epochs of each fit",
    "train/ent_coef": "temperature",
    "train/critic_loss": "critic loss",
    "termination/recall": "recall of ends",
}
_PHASES = {
    "time/collect_seconds": "collecting",
    "time/fit_seconds": "fitting the model",
    "time/improve_seconds": "improving the policy",
    "time/compile_seconds": "waiting for the compiler",
}
_LARGEST_VIDEO = 30_000_000  # bytes; more would make the page slow to open


def write_report(folders: list[Path], out: Path, reference: Path | None = None) -> None:
    """Reads the runs and writes the page."""
    runs = [read_run(folder) for folder in folders]
    labels = _labels(runs)
    data = {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "tasks": _tasks(runs, labels, reference),
        "finals": [_final(run, label) for run, label in zip(runs, labels, strict=True)],
        "runs": [_run(run, label) for run, label in zip(runs, labels, strict=True)],
    }
    page = resources.files("doublehorizon.analysis").joinpath("report.html").read_text()
    # no text may end the script, or hide where it ends
    content = json.dumps(_finite(data), allow_nan=False).replace("<", "\\u003c")
    try:
        write_file(out, page.replace("@DATA@", content).encode())
    except OSError as problem:
        raise UserError(f"{out} cannot be written: {problem.strerror}.") from problem


def _labels(runs: list[Run]) -> list[str]:
    """Folder names, with as much of the path as makes them different."""
    for depth in range(1, 8):
        labels = ["/".join(run.folder.resolve().parts[-depth:]) for run in runs]
        if len(set(labels)) == len(labels):
            return labels
    raise UserError("a run is named twice.")


def _tasks(runs: list[Run], labels: list[str], reference: Path | None) -> list[dict[str, Any]]:
    tasks: dict[str, list[dict[str, Any]]] = {}
    for run, label in zip(runs, labels, strict=True):
        tasks.setdefault(run.name, []).append({"label": label, "points": _mean_curve(run.folder, None)})
    if reference is not None:
        for name, curves in tasks.items():
            last = max(point[0] for curve in curves for point in curve["points"])
            points = [point for point in _mean_curve(reference, name.rsplit("/", 1)[-1]) if point[0] <= last]
            curves.append({"label": reference.name, "points": points})
    return [{"name": name, "curves": curves} for name, curves in tasks.items()]


def _mean_curve(path: Path, task: str | None) -> list[list[float]]:
    curves = find_curves(path, task)
    steps = common_steps(curves)
    mean, half = mean_and_interval(curves, steps)
    return [[float(s), m, m - h, m + h] for s, m, h in zip(steps, mean.tolist(), half.tolist(), strict=True)]


def _final(run: Run, label: str) -> dict[str, Any]:
    curves = find_curves(run.folder)
    step = common_steps(curves)[-1]
    last = [curve[step] for curve in curves.values()]
    mean, half = mean_and_interval(curves, [step])
    return {
        "task": run.name,
        "label": label,
        "step": step,
        "mean": float(mean[0]),
        "low": float(mean[0] - half[0]),
        "high": float(mean[0] + half[0]),
        "lowest": min(last),
        "highest": max(last),
        "seeds": len(last),
        "note": NO_GAIN if no_gain(run.evaluations()) else "",
    }


def _run(run: Run, label: str) -> dict[str, Any]:
    path = run.folder / "progress.csv"
    rows = read_rows(path) if path.exists() else []
    try:
        return _sections(run, label, rows)
    except (KeyError, ValueError) as problem:
        raise UserError(f"{path} is damaged: {type(problem).__name__} {problem}.") from problem


def _sections(run: Run, label: str, rows: list[dict[str, str]]) -> dict[str, Any]:
    steps = sorted({int(row["time/total_timesteps"]) for row in rows})
    return {
        "label": label,
        "seeds": [
            {"label": f"seed {seed}", "points": sorted([float(step), value] for step, value in curve.items())}
            for seed, curve in find_curves(run.folder).items()
        ],
        "model": [
            {"title": title, "label": "mean over seeds", "points": _over_seeds(rows, steps, name, np.mean)}
            for name, title in _MODEL.items()
            if rows and name in rows[0]
        ],
        "time": [
            {"label": title, "points": _over_seeds(rows, steps, name, np.max)}
            for name, title in _PHASES.items()
            if rows and name in rows[0]
        ],
        "phases": [
            {"name": title, "seconds": sum(p[1] for p in _over_seeds(rows, steps, name, np.max))}
            for name, title in _PHASES.items()
            if rows and name in rows[0]
        ],
        "films": _films(run.folder / "video"),
        "about": json.loads((run.folder / "config.json").read_text()),
    }


def _over_seeds(
    rows: list[dict[str, str]], steps: list[int], name: str, summary: Callable[[list[float]], Any]
) -> list[list[float]]:
    """A column of `progress.csv` per iteration; times are the same for all seeds."""
    values: dict[int, list[float]] = {step: [] for step in steps}
    for row in rows:
        value = float(row[name] or "nan")
        if math.isfinite(value):
            values[int(row["time/total_timesteps"])].append(value)
    return [[float(step), float(summary(found))] for step, found in values.items() if found]


def _films(folder: Path) -> list[dict[str, str]]:
    films = sorted(folder.glob("*.mp4")) if folder.is_dir() else []
    return [
        {"name": film.stem, "data": "data:video/mp4;base64," + base64.b64encode(film.read_bytes()).decode()}
        for film in films
        if film.is_file() and not film.is_symlink() and film.stat().st_size <= _LARGEST_VIDEO
    ]


def _finite(value: Any) -> Any:
    """JSON knows no NaN: such numbers become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list) else value
