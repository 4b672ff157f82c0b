"""`doublehorizon analyze model`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from doublehorizon.cli.analyze import Analyze
from doublehorizon.cli.options import require_positive
from doublehorizon.cli.parsing import parse

if TYPE_CHECKING:
    from doublehorizon.analysis.loaded_seed import LoadedSeed
    from doublehorizon.analysis.model_error import Accuracy, OpenLoop

_EXAMPLES = """How good the model of a run is: one step ahead, on data that it was fitted to, that was held out, and
that came later (seen by the oldest checkpoint that is kept, or by fresh fits to the beginning of the data); and many
steps ahead along real trajectories.

examples:
  doublehorizon analyze model runs/hopper
  doublehorizon analyze model runs/hopper --refit 5000 20000 --horizon 50 --json"""


@dataclass
class Model(Analyze):
    """What `doublehorizon analyze model` takes."""

    horizon: int = 20
    """Steps of the open loop."""
    trajectories: int = 256
    """Real trajectories that are followed."""
    particles: int = 32
    """Imagined trajectories beside each of them."""
    rows: int = 20_000
    """Transitions of each kind at most."""
    refit: tuple[int, ...] = ()
    """Fit fresh models to the first N transitions, and measure these too: it takes as long as a first fit."""


def run(arguments: list[str]) -> int:
    """Parses, measures, draws."""
    options = parse(Model, "analyze model", _EXAMPLES, arguments)
    require_positive(options, "horizon", "trajectories", "particles", "rows")
    needed = options.needed()

    from doublehorizon.analysis.loaded_seed import loaded_seeds, open_run, require_model
    from doublehorizon.run.checkpoint_reader import learnt_steps

    found = {}
    with (
        open_run(options.run, options.device, needed) as model,
        Progress(console=Console(stderr=True, emoji=False), transient=True) as bar,
    ):
        names = model.spec.obs_names
        chosen = {loaded.seed: loaded for loaded in loaded_seeds(model, options.seeds)}
        for loaded in chosen.values():
            require_model(loaded, "this analysis")
        later = _later(options, needed, learnt_steps(options.run)[:1], chosen)
        for seed, loaded in chosen.items():
            found[seed] = _measure(options, loaded, later.get(seed, {}), bar)
    path = options.figure("model-error")
    _draw(found, path)
    print(json.dumps(_plain(found, str(path))) if options.json else f"{_words(found, names)}\n{path}")
    return 0


@dataclass(frozen=True)
class Found:
    """Of one seed: accuracies by kind of data, and the open loop."""

    accuracy: dict[str, "Accuracy"]
    open_loop: "OpenLoop"


def _measure(options: Model, loaded: "LoadedSeed", later: dict[str, "Accuracy"], bar: Progress) -> Found:
    import jax.random as jr

    from doublehorizon.analysis import model_error

    task = bar.add_task(f"seed {loaded.seed}", total=options.horizon + 2 + len(options.refit))
    world = loaded.context.world
    accuracy = {}
    for name, rows in model_error.split(loaded, loaded.num_rows, options.rows).items():
        accuracy[name] = model_error.accuracy(loaded.config, world, rows)
        bar.advance(task)
    accuracy |= later
    for size in options.refit:
        fresh = model_error.refitted(loaded, size)
        for name, rows in model_error.split(loaded, size, options.rows).items():
            accuracy[f"{name}, fitted to {size}"] = model_error.accuracy(loaded.config, fresh, rows)
        rest = model_error.later(loaded, size, min(options.rows, 5000))
        if rest is not None:
            accuracy[f"later, fitted to {size}"] = model_error.accuracy(loaded.config, fresh, rest)
        bar.advance(task)
    starts = model_error.trajectories(
        loaded.replay.rows, loaded.num_rows, options.horizon, options.trajectories, loaded.seed
    )
    loop = model_error.open_loop(
        loaded, starts, options.horizon, options.particles, jr.key(loaded.seed), lambda: bar.advance(task)
    )
    bar.remove_task(task)
    return Found(accuracy, loop)


def _later(
    options: Model, needed: dict[str, Any], steps: list[int], now: dict[int, "LoadedSeed"]
) -> dict[int, dict[str, "Accuracy"]]:
    """What the model of an older checkpoint, if there is one, says of data that came after it; by seed."""
    from doublehorizon.analysis import model_error
    from doublehorizon.analysis.loaded_seed import loaded_seeds, open_run

    found: dict[int, dict[str, Accuracy]] = {}
    for step in steps:
        with open_run(options.run, options.device, needed, step) as model:
            for old in loaded_seeds(model, options.seeds):
                rows = model_error.later(now[old.seed], old.num_rows, options.rows)
                if rows is not None:
                    seen = model_error.accuracy(old.config, old.context.world, rows)
                    found[old.seed] = {f"later, seen from {step}": seen}
    return found


def _draw(found: dict[int, Found], path: Path) -> None:
    from doublehorizon.analysis.figures import COLORS, new_figure, save_figure

    figure, (bars, loop) = new_figure(1, 2)
    _draw_accuracy(bars, found)
    for color, (seed, one) in zip(COLORS * len(found), found.items(), strict=False):
        steps = range(1, len(one.open_loop.error) + 1)
        loop.plot(steps, one.open_loop.error, color=color, label=f"seed {seed}: error")
        loop.plot(steps, one.open_loop.spread, color=color, linestyle="--", label="the model's own spread")
        loop.plot(steps, one.open_loop.standing_still, color=color, linestyle=":", label="if nothing changed")
    loop.set(title="open loop", xlabel="steps", ylabel="standard deviations of the observation", yscale="log")
    loop.legend(fontsize="x-small")
    loop.xaxis.get_major_locator().set_params(integer=True)
    for axis in (bars, loop):
        axis.grid(alpha=0.3)
    save_figure(figure, path)


def _draw_accuracy(axis: Any, found: dict[int, Found]) -> None:
    """A group of bars for each model, a color for each kind of data; bars are means over seeds, points the seeds."""
    from doublehorizon.analysis.figures import COLORS

    names = list(dict.fromkeys(name for one in found.values() for name in one.accuracy))
    models = list(dict.fromkeys(_model_of(name) for name in names))
    for k, kind in enumerate(("training", "held out", "later")):
        chosen = [name for name in names if name.startswith(kind)]
        places = [models.index(_model_of(name)) + (k - 1) * 0.27 for name in chosen]
        heights = [
            [one.accuracy[name].total_relative for one in found.values() if name in one.accuracy] for name in chosen
        ]
        axis.bar(places, [sum(each) / len(each) for each in heights], 0.25, color=COLORS[k], label=kind)
        for place, each in zip(places, heights, strict=True):
            axis.plot([place] * len(each), each, ".", color="black", markersize=4)
    axis.set_xticks(range(len(models)), models)
    axis.set(title="one step ahead", ylabel="RMSE / standard deviation")
    axis.legend(fontsize="small")


def _model_of(name: str) -> str:
    """Which model an accuracy is of: "later, fitted to 5000" -> "fitted to 5000", "training" -> "the run's"."""
    return name.partition(", ")[2] or "the run's"


def _words(found: dict[int, Found], names: list[str]) -> str:
    """`names` are those of the observation's numbers."""
    lines = []
    for seed, one in found.items():
        lines.append(f"seed {seed}, one step ahead:")
        for name, part in one.accuracy.items():
            inside = ", ".join(f"{level:.0%}: {share:.0%}" for level, share in part.coverage.items())
            lines.append(
                f"  {name:<28} {part.rows:>6} rows  RMSE {part.total:.4g}  relative {part.total_relative:.3f}  "
                f"within its own intervals {inside}"
            )
        shown = one.accuracy.get("held out", one.accuracy["training"])
        worst = sorted(zip(shown.relative, ["reward", *names], strict=True), reverse=True)[:5]
        lines.append("  hardest to predict: " + ", ".join(f"{name} {value:.3f}" for value, name in worst))
        loop = one.open_loop
        picked = sorted({0, 1, 4, 9, 19, len(loop.error) - 1} & set(range(len(loop.error))))
        errors = ", ".join(f"{i + 1}: {loop.error[i]:.3f} ({loop.spread[i]:.3f})" for i in picked)
        lines.append(f"  open loop, error (and spread) after steps, {loop.trajectories} trajectories: {errors}")
    return "\n".join(lines)


def _plain(found: dict[int, Found], path: str) -> dict[str, Any]:
    def part(one: "Accuracy") -> dict[str, Any]:
        return asdict(one) | {"total": one.total, "total_relative": one.total_relative}

    seeds = {
        seed: {
            "accuracy": {name: part(one) for name, one in this.accuracy.items()},
            "open_loop": asdict(this.open_loop),
        }
        for seed, this in found.items()
    }
    return {"figure": path, "seeds": seeds}
