"""`doublehorizon analyze critic-error`."""

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from doublehorizon.cli.analyze import Analyze
from doublehorizon.cli.options import IntIfGiven, require_positive
from doublehorizon.cli.parsing import parse
from doublehorizon.errors import UserError

if TYPE_CHECKING:
    from doublehorizon.analysis.critic_error import ErrorCurve
    from doublehorizon.analysis.loaded_seed import LoadedSeed
    from doublehorizon.api import DHMBPO

_EXAMPLES = """How fast critics learn the true value, with and without distribution rollouts: policy and model of a run
stay as they are, critics begin anew, and their estimate is held against real episodes that begin in states of the
replay. The environment must be one that can be put into such a state (Gymnasium's MuJoCo tasks that observe positions
and velocities, paper/X, Pendulum, or one with a method set_observation).

examples:
  doublehorizon analyze critic-error runs/hopper
  doublehorizon analyze critic-error runs/hopper --seeds 0 --pairs 64 --episodes 4 --updates 500"""


@dataclass
class CriticError(Analyze):
    """What `doublehorizon analyze critic-error` takes."""

    pairs: int = 256
    """Pairs of state and action from the replay."""
    episodes: int = 8
    """Real episodes from each pair. The paper's 2048 cost half a billion environment steps."""
    horizon: IntIfGiven = None
    """Steps of such an episode at most. Default: until what still comes is worth a hundredth."""
    updates: int = 2000
    """Updates of the critics."""
    every: int = 100
    """Updates between two measurements."""
    repeats: int = 8
    """How often critics begin anew, with other initial weights. The paper: 32."""
    rollouts: int = 16
    """Imagined rollouts that an estimate is the mean of."""
    distribution: IntIfGiven = None
    """Horizon of the distribution rollouts. Default: the run's, or 20 if it had none."""


def run(arguments: list[str]) -> int:
    """Parses, measures, draws."""
    options = parse(CriticError, "analyze critic-error", _EXAMPLES, arguments)
    require_positive(options, "pairs", "episodes", "horizon", "updates", "every", "repeats", "rollouts", "distribution")
    needed = options.needed()

    from doublehorizon.analysis.loaded_seed import loaded_seeds, open_run, require_model

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with (
        open_run(options.run, options.device, needed) as model,
        Progress(*columns, console=Console(stderr=True, emoji=False), transient=True) as bar,
    ):
        chosen = loaded_seeds(model, options.seeds)
        for loaded in chosen:
            require_model(loaded, "the critics' error along training rollouts")
            if loaded.config.horizons.training == 0:
                raise UserError("this run has no training rollouts (preset no-tr), along which critics are compared.")
        found = {loaded.seed: _measure(options, model, loaded, bar) for loaded in chosen}
    path = options.figure("critic-error")
    _draw(found, path)
    print(json.dumps(_plain(found, str(path))) if options.json else f"{_words(found)}\n{path}")
    return 0


Found = dict[int, dict[str, "ErrorCurve"]]
"""Curves by seed, and by whether there are distribution rollouts."""


def _measure(options: CriticError, model: "DHMBPO", loaded: "LoadedSeed", bar: Progress) -> dict[str, "ErrorCurve"]:
    import jax.random as jr

    from doublehorizon.acting.env_runner import MonteCarloSpec, RunnerGroup
    from doublehorizon.acting.workers import WorkerPool
    from doublehorizon.analysis.critic_error import Trial, horizon_for, learn_again, true_values

    pairs = loaded.drawn(options.pairs, jr.key(loaded.seed))
    discount = loaded.context.discount
    temperature = float(loaded.state.actor_critic.temperature * loaded.context.reward_unit)
    how = MonteCarloSpec(options.episodes, options.horizon or horizon_for(discount), discount, temperature)
    policy = model.policies[model.seeds.index(loaded.seed)]
    task = bar.add_task(f"seed {loaded.seed}: real episodes", total=options.pairs)
    workers = list(range(min(options.pairs, os.cpu_count() or 1)))
    runners = RunnerGroup(model.worker_spec()) if model.env_source.is_single else None
    with WorkerPool(model.worker_spec(), workers, runners=runners) as pool:
        truth = true_values(pool, policy, pairs, how, lambda done: bar.update(task, completed=done))
    bar.remove_task(task)

    distribution = options.distribution or loaded.config.horizons.distribution or 20
    curves = {}
    for label, horizon in (("with distribution rollouts", distribution), ("from the replay", 0)):
        trial = Trial(horizon, options.updates, options.every, options.repeats, options.rollouts)
        task = bar.add_task(f"seed {loaded.seed}: critics {label}", total=-(-options.updates // options.every))
        curves[label] = learn_again(loaded, pairs, truth, trial, lambda task=task: bar.advance(task))
        bar.remove_task(task)
    return curves


def _draw(found: Found, path: Any) -> None:
    from doublehorizon.analysis.figures import COLORS, figure_of, save_figure

    figure, axes = figure_of(len(found))
    for axis, (seed, curves) in zip(axes, found.items(), strict=True):
        for color, (label, curve) in zip(COLORS, curves.items(), strict=False):
            mean, half = curve.mean_and_interval()
            axis.plot(curve.updates, mean, color=color, label=label)
            axis.fill_between(curve.updates, mean - half, mean + half, color=color, alpha=0.2, linewidth=0)
        axis.set(title=f"seed {seed}", xlabel="critic updates", ylabel="relative error (RMedSE)", yscale="log")
        axis.legend(fontsize="small")
        axis.grid(alpha=0.3)
    save_figure(figure, path)


def _words(found: Found) -> str:
    lines = [
        "relative error of the critics' targets (root of the median squared error), mean over repeats [95% interval]"
    ]
    for seed, curves in found.items():
        for label, curve in curves.items():
            mean, half = curve.mean_and_interval()
            picked = sorted({0, len(mean) // 4, len(mean) // 2, len(mean) - 1})
            values = "   ".join(f"{curve.updates[i]}: {_interval(float(mean[i]), float(half[i]))}" for i in picked)
            lines.append(f"  seed {seed}, {label:<27} {values}")
    return "\n".join(lines)


def _interval(mean: float, half: float) -> str:
    return f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]"


def _plain(found: Found, path: str) -> dict[str, Any]:
    seeds = {
        seed: {
            label: {"updates": curve.updates, "errors": np.round(curve.errors, 6).tolist()}
            for label, curve in curves.items()
        }
        for seed, curves in found.items()
    }
    return {"figure": path, "seeds": seeds}
