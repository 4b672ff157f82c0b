"""`doublehorizon advise-horizon`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from doublehorizon.cli.analyze import Analyze
from doublehorizon.cli.options import require_positive

if TYPE_CHECKING:
    from doublehorizon.analysis.gradients import Tradeoff

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
    options = tyro.cli(AdviseHorizon, prog="doublehorizon advise-horizon", description=_EXAMPLES, args=arguments)
    require_positive(options, "states", "rollouts")
    needed = options.needed()

    import jax.random as jr

    from doublehorizon.analysis import gradients
    from doublehorizon.analysis.subject import opened, require_model, subjects

    found: dict[int, Tradeoff] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with (
        opened(options.run, options.device, needed) as model,
        Progress(*columns, console=Console(stderr=True), transient=True) as bar,
    ):
        current = model.config.horizons.training
        for subject in subjects(model, options.seeds):
            require_model(subject, "advice on horizons")
            task = bar.add_task(f"seed {subject.seed}: gradients", total=gradients.GROUPS)
            horizons = (*options.horizons, current) if current > 0 else options.horizons
            counts = (horizons, options.states, options.rollouts)
            found[subject.seed] = gradients.measure(
                subject,
                *counts,
                jr.key(subject.seed),
                lambda task=task: bar.advance(task),
                from_replay=options.starts == "replay",
            )
            bar.remove_task(task)
    path = options.figure("horizons")
    _draw(found, path)
    advice = gradients.advise(list(found.values()), current)
    if options.json:
        print(json.dumps(_plain(found, str(path)) | {"recommended": advice.horizon, "reason": advice.reason}))
    else:
        print(f"{_words(found)}\n\n{advice.reason}\n{path}")
    return 0


def _draw(found: dict[int, "Tradeoff"], path: Path) -> None:
    from doublehorizon.analysis.figures import COLORS, figure_of, save_figure

    figure, axes = figure_of(4)
    parts = {
        "bias": "the paper's bias",
        "distance": "squared distance of mean gradients",
        "standard_error": "standard error over states",
        "error": "squared error of a training step",
    }
    for axis, (name, title) in zip(axes, parts.items(), strict=True):
        for color, (seed, one) in zip(COLORS * len(found), found.items(), strict=False):
            axis.plot(one.horizons, getattr(one, name), "o-", color=color, label=f"seed {seed}")
            if name == "error":
                axis.fill_between(
                    one.horizons, one.error - 2 * one.spread, one.error + 2 * one.spread, color=color, alpha=0.2
                )
        axis.set(title=title, xlabel="steps of the training rollout")
        axis.set_xticks(next(iter(found.values())).horizons)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    save_figure(figure, path)


def _words(found: dict[int, "Tradeoff"]) -> str:
    lines = []
    for seed, one in found.items():
        lines.append(f"seed {seed}: {one.num_states} states, {one.num_rollouts} rollouts each; gradients per parameter")
        lines.append("  steps  bias (paper's)  distance of means  standard error  noise of a batch  error of a step")
        for i, horizon in enumerate(one.horizons):
            lines.append(
                f"  {horizon:>5}  {one.bias[i]:>14.3e}  {one.distance[i]:>17.3e}  {one.standard_error[i]:>14.3e}  "
                f"{one.noise[i]:>16.3e}  {one.error[i]:>10.3e} +- {2 * one.spread[i]:.1e}"
            )
    return "\n".join(lines)


def _plain(found: dict[int, "Tradeoff"], path: str) -> dict[str, Any]:
    arrays = ("bias", "distance", "standard_error", "noise", "error", "spread")
    seeds = {
        seed: {
            "horizons": one.horizons,
            "states": one.num_states,
            "rollouts": one.num_rollouts,
            "best": one.best,
            "candidates": one.candidates,
        }
        | {name: getattr(one, name).tolist() for name in arrays}
        for seed, one in found.items()
    }
    return {"figure": path, "seeds": seeds}
