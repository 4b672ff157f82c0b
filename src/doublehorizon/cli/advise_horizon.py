"""`doublehorizon advise-horizon`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from doublehorizon.cli.analyze import Analyze
from doublehorizon.cli.options import require_positive
from doublehorizon.cli.parsing import parse

if TYPE_CHECKING:
    from doublehorizon.analysis.aggregate import Interval
    from doublehorizon.analysis.gradients import Tradeoff
    from doublehorizon.analysis.horizon_advice import Verdict

_EXAMPLES = """Advises how long training rollouts should be (horizons.training), from a run's replay and model alone,
without an environment step: a longer rollout leaves less to the critics, whose word is biased, but adds up more noise.

examples:
  doublehorizon advise-horizon runs/hopper
  doublehorizon advise-horizon runs/hopper --states 2048 --rollouts 2048 --starts replay    # as in the paper"""


@dataclass
class AdviseHorizon(Analyze):
    """What `doublehorizon advise-horizon` takes."""

    horizons: tuple[int, ...] = (1, 3, 5, 7, 9)
    """Those that are compared, with that of the run; the longest stands for the truth."""
    states: int = 256
    """States from which rollouts begin."""
    starts: Literal["training", "replay"] = "training"
    """Where that is: where training begins, in states that distribution rollouts came to; or in the replay's."""
    rollouts: int = 64
    """Imagined rollouts from each."""


def run(arguments: list[str]) -> int:
    """Parses, measures, advises."""
    options = parse(AdviseHorizon, "advise-horizon", _EXAMPLES, arguments)
    require_positive(options, "states", "rollouts")
    needed = options.needed()

    import jax.random as jr

    from doublehorizon.analysis import gradients, horizon_advice
    from doublehorizon.analysis.loaded_seed import loaded_seeds, open_run, require_model

    found: dict[int, Tradeoff] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with (
        open_run(options.run, options.device, needed) as model,
        Progress(*columns, console=Console(stderr=True, emoji=False), transient=True) as bar,
    ):
        current = model.config.horizons.training
        for loaded in loaded_seeds(model, options.seeds):
            require_model(loaded, "advice on horizons")
            task = bar.add_task(f"seed {loaded.seed}: gradients", total=gradients.GROUPS)
            horizons = (*options.horizons, current) if current > 0 else options.horizons
            counts = (horizons, options.states, options.rollouts)
            found[loaded.seed] = gradients.measure(
                loaded,
                *counts,
                jr.key(loaded.seed),
                lambda task=task: bar.advance(task),
                from_replay=options.starts == "replay",
            )
            bar.remove_task(task)
    path, all_seeds = options.figure("horizons"), list(found.values())
    advised, growth = horizon_advice.advise(all_seeds, current), horizon_advice.growth(all_seeds)
    _draw(found, path)
    if options.json:
        advice = {"recommended": advised.horizon, "reason": advised.reason}
        print(json.dumps(_plain(found, advised.verdict, growth, path) | advice))
    else:
        print(f"{_words(found, advised.verdict, growth)}\n\n{advised.reason}\n{path}")
    return 0


def _draw(found: dict[int, "Tradeoff"], path: Path) -> None:
    """Each seed, and their median. One seed may be a thousand times another, so scales are logarithmic: distances of 0
    (the longest's from itself), and estimates below it, are left out."""
    import numpy as np

    from doublehorizon.analysis.figures import COLORS, figure_of, save_figure

    figure, axes = figure_of(4)
    parts = {
        "bias": "the paper's bias",
        "distance": "squared distance of mean gradients",
        "standard_error": "standard error over states",
        "error": "squared error of a training step",
    }
    horizons = next(iter(found.values())).horizons
    for axis, (name, title) in zip(axes, parts.items(), strict=True):
        rows = np.array([getattr(one, name) for one in found.values()])
        for color, seed, row in zip(COLORS * len(found), found, rows, strict=False):
            shown = np.where(row > 0.0, row, np.nan)
            axis.plot(horizons, shown, "o-", color=color, label=f"seed {seed}", markersize=4, alpha=0.7)
        if len(found) > 1:
            middle = np.median(rows, axis=0)
            axis.plot(horizons, np.where(middle > 0.0, middle, np.nan), "k--", linewidth=2, label="median")
        axis.set(title=title, xlabel="steps of the training rollout", yscale="log")
        axis.set_xticks(horizons)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="x-small" if len(found) > 4 else "small")
    save_figure(figure, path)


def _words(found: dict[int, "Tradeoff"], verdict: "Verdict", growth: "Interval") -> str:
    lines = []
    for seed, one in found.items():
        lines.append(f"seed {seed}: {one.num_states} states, {one.num_rollouts} rollouts each; gradients per parameter")
        lines.append("  steps  bias (paper's)  distance of means  standard error  noise of a batch  error of a step")
        for i, horizon in enumerate(one.horizons):
            lines.append(
                f"  {horizon:>5}  {one.bias[i]:>14.3e}  {one.distance[i]:>17.3e}  {one.standard_error[i]:>14.3e}  "
                f"{one.noise[i]:>16.3e}  {one.error[i]:>15.3e}"
            )
    seeds = f"{len(found)} seeds, geometric mean" if len(found) > 1 else "one seed"
    both = " and both seeds" if len(found) == 2 else ""
    interval = "95% interval" if len(found) > 2 else f"two standard errors over states{both}"
    lines.append(f"error of a step as a multiple of the least ({seeds}; {interval})")
    for horizon, ratio, low, high in zip(verdict.horizons, verdict.ratio, verdict.low, verdict.high, strict=True):
        around = f"[{low:.2f}, {high:.2f}]" if horizon != verdict.best else ""
        lines.append(f"  {horizon:>5}  {ratio:>14.2f}  {around}".rstrip())
    sure = f" [{growth.low:.2f}, {growth.high:.2f}]" if len(found) > 1 else ""
    lines.append(f"the standard error changes by a factor of {growth.value:.2f}{sure} with each step")
    return "\n".join(lines)


def _plain(found: dict[int, "Tradeoff"], verdict: "Verdict", growth: "Interval", path: Path) -> dict[str, Any]:
    arrays = ("bias", "distance", "standard_error", "noise", "error")
    seeds = {
        seed: {"horizons": one.horizons, "states": one.num_states, "rollouts": one.num_rollouts}
        | {name: getattr(one, name).tolist() for name in arrays}
        for seed, one in found.items()
    }
    together = {
        "horizons": verdict.horizons,
        "ratio": verdict.ratio.tolist(),
        "low": verdict.low.tolist(),
        "high": verdict.high.tolist(),
        "best": verdict.best,
        "candidates": verdict.candidates,
    }
    interval = {"low": growth.low, "high": growth.high} if len(found) > 1 else {}
    grows = {"standard_error_growth": {"value": growth.value} | interval}
    return {"figure": str(path), "seeds": seeds, "together": together} | grows
