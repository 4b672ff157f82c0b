"""`doublehorizon analyze targets`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import track

from doublehorizon.cli.analyze import Analyze
from doublehorizon.cli.options import require_positive
from doublehorizon.cli.parsing import parse
from doublehorizon.errors import UserError

if TYPE_CHECKING:
    from doublehorizon.analysis.critic_targets import TargetStats

_EXAMPLES = """Histograms of rewards and of critic targets over training, with the bounds of Q drawn in, at the
checkpoints that a run has kept. A run keeps its last three; to look back further, train with more
(--loop.keep-checkpoints 100).

examples:
  doublehorizon train paper/Hopper --steps 50000 --checkpoint-every 10 --loop.keep-checkpoints 100 --out runs/hopper
  doublehorizon analyze targets runs/hopper"""

_BINS = 60


@dataclass
class Targets(Analyze):
    """What `doublehorizon analyze targets` takes."""

    batches: int = 16
    """Batches of updates whose targets are looked at."""
    most: int = 5
    """Checkpoints at most, spread evenly over those that are kept."""


def run(arguments: list[str]) -> int:
    """Parses, looks at each checkpoint, draws."""
    options = parse(Targets, "analyze targets", _EXAMPLES, arguments)
    require_positive(options, "batches", "most")
    needed = options.needed()

    import jax.random as jr

    from doublehorizon.analysis.critic_targets import target_stats
    from doublehorizon.analysis.loaded_seed import loaded_seeds, open_run

    found: dict[int, list[TargetStats]] = {}
    for step in track(_steps(options), "looking", console=Console(stderr=True, emoji=False), transient=True):
        with open_run(options.run, options.device, needed, step) as model:
            for loaded in loaded_seeds(model, options.seeds):
                key = jr.key(loaded.seed)
                found.setdefault(loaded.seed, []).append(target_stats(loaded, step, options.batches, key))
    path = options.figure("targets")
    _draw(found, path)
    print(json.dumps(_plain(found, str(path))) if options.json else f"{_words(found)}\n{path}")
    return 0


def _steps(options: Targets) -> list[int]:
    """Some of the checkpoints at which something had been learnt."""
    from doublehorizon.run.checkpoint_reader import learnt_steps

    learnt = learnt_steps(options.run)
    if not learnt:
        raise UserError(f"{options.run} has no checkpoint at which something had been learnt.")
    picked = np.unique(np.linspace(len(learnt) - 1, 0, options.most).round().astype(int))
    return [learnt[i] for i in picked]


def _draw(found: dict[int, list["TargetStats"]], path: Path) -> None:
    """A row of pictures per kind, a column per checkpoint; one seed after the other, in its own color."""
    from doublehorizon.analysis.figures import COLORS, new_figure, save_figure

    columns = len(next(iter(found.values())))
    figure, axes = new_figure(2, columns)
    for color, (seed, lessons) in zip(COLORS * len(found), found.items(), strict=False):
        for k, one in enumerate(lessons):
            above, below = axes[k], axes[columns + k]
            above.hist(one.rewards, _BINS, color=color, alpha=0.5, density=True, label=f"seed {seed}")
            above.hist(one.soft_rewards, _BINS, color=color, histtype="step", density=True)
            below.hist(one.targets, _BINS, color=color, alpha=0.5, density=True, label=f"seed {seed}")
            for bound in (one.low, one.high):
                below.axvline(bound, color=color, linestyle="--", linewidth=1)
            above.set(title=f"step {one.step:,}", xlabel="reward (filled: real; line: imagined, soft)", yscale="log")
            below.set(xlabel="critic target (dashed: bounds of Q)", yscale="log")
    axes[0].legend(fontsize="small")
    save_figure(figure, path)


def _words(found: dict[int, list["TargetStats"]]) -> str:
    lines = ["seed     step  rewards (1%, 50%, 99%)     targets (1%, 50%, 99%)     bounds of Q           outside"]
    for seed, lessons in found.items():
        for one in lessons:
            rewards, targets = (np.percentile(x, [1, 50, 99]) for x in (one.rewards, one.targets))
            lines.append(
                f"{seed:>4} {one.step:>8}  {_three(rewards):<25}  {_three(targets):<25}  "
                f"{one.low:>8.4g} .. {one.high:<8.4g}  {one.outside:.1%}"
            )
    return "\n".join(lines)


def _three(values: np.ndarray) -> str:
    return " ".join(f"{value:.3g}" for value in values)


def _plain(found: dict[int, list["TargetStats"]], path: str) -> dict[str, Any]:
    def histogram(values: np.ndarray) -> dict[str, Any]:
        counts, edges = np.histogram(values, _BINS)
        return {"counts": counts.tolist(), "edges": edges.tolist()}

    seeds = {
        seed: [
            {
                "step": one.step,
                "low": one.low,
                "high": one.high,
                "outside": one.outside,
                "rewards": histogram(one.rewards),
                "soft_rewards": histogram(one.soft_rewards),
                "targets": histogram(one.targets),
            }
            for one in lessons
        ]
        for seed, lessons in found.items()
    }
    return {"figure": path, "seeds": seeds}
