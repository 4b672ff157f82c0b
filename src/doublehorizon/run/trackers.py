"""Other places for a run's figures, beside its CSV files: TensorBoard, Weights & Biases. Names are those of the CSV
columns, which are Stable-Baselines3's where it has them; a test return is `eval/mean_reward`."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from doublehorizon.errors import UserError


@runtime_checkable
class Tracker(Protocol):
    """Takes figures of a seed at a step."""

    def track(self, step: int, seed: int, figures: Mapping[str, float | int]) -> None:
        """Some figures by name; a figure comes once per step and seed."""
        ...

    def close(self) -> None:
        """No more figures will come."""
        ...


def as_trackers(given: Sequence[Any]) -> Sequence[Tracker]:
    """What was given; what is no tracker is told at once."""
    for one in given:
        if not isinstance(one, Tracker):
            raise UserError(
                f"trackers has {one!r}, but dh.trackers.TensorBoard(folder), dh.trackers.WandB() or an object with "
                "track and close is needed."
            )
    return given


def _finite(figures: Mapping[str, float | int]) -> dict[str, float | int]:
    """What there was nothing to count for is not a number, and is left out."""
    return {name: value for name, value in figures.items() if math.isfinite(value)}


class TensorBoard:
    """Writes event files, one folder per seed: `tensorboard --logdir FOLDER` shows them."""

    def __init__(self, folder: str | Path):
        try:
            from tensorboardX import SummaryWriter  # type: ignore[import-not-found]
        except ImportError as problem:
            raise UserError(
                "TensorBoard's files are written by tensorboardX, which is not installed: "
                "pip install 'doublehorizon[tensorboard]'."
            ) from problem
        self._folder, self._make = Path(folder), SummaryWriter
        self._writers: dict[int, Any] = {}

    def track(self, step: int, seed: int, figures: Mapping[str, float | int]) -> None:
        if seed not in self._writers:
            # what an earlier process wrote beyond this step belongs to a run that went on differently
            self._writers[seed] = self._make(str(self._folder / f"seed{seed}"), purge_step=step)
        for name, value in _finite(figures).items():
            self._writers[seed].add_scalar(name, value, step)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class WandB:
    """Sends figures to Weights & Biases, or keeps them in a folder if there is no account (`mode` "offline")."""

    def __init__(self, folder: str | Path, project: str = "doublehorizon", mode: str | None = None, **about: Any):
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError as problem:
            raise UserError("Weights & Biases is not installed: pip install 'doublehorizon[wandb]'.") from problem
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = Path(folder).resolve().name
        self._run = wandb.init(project=project, name=name, dir=str(folder), mode=mode, config=about)  # type: ignore

    def track(self, step: int, seed: int, figures: Mapping[str, float | int]) -> None:
        self._run.log({f"seed{seed}/{name}": value for name, value in _finite(figures).items()} | {"steps": step})

    def close(self) -> None:
        self._run.finish()
