"""`doublehorizon bench-model`."""

import dataclasses
import json
import math
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from doublehorizon.cli.options import Device, require_positive
from doublehorizon.cli.parsing import parse
from doublehorizon.config import Config
from doublehorizon.config_json import changed, written_value
from doublehorizon.errors import UserError
from doublehorizon.jax_settings import prepare_jax
from doublehorizon.presets import PRESETS, preset

if TYPE_CHECKING:
    from doublehorizon.analysis.replay_forward import Score

_EXAMPLES = """How good a way of fitting is, with no noise of learning: over the stored transitions of a run it fits as
a training would, iteration by iteration, and asks each model about the transitions that came next.

examples:
  doublehorizon bench-model runs/ant
  doublehorizon bench-model runs/ant runs/hopper --preset light --json
  doublehorizon bench-model ant.npz --try "fit.batch_size=1024" --try "slow: fit.batch_size=256 fit.learning_rate=1e-3"

Each --try changes some values of the preset, and may begin with a title; the preset itself is measured first. RMSE is
in units of the standard deviation of what is predicted: 1 is as bad as predicting the mean. `reward` is that of steps
that continue, `terminal` that of steps that terminate, in the same unit."""


@dataclass
class BenchModel:
    """What `doublehorizon bench-model` takes."""

    replays: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_NPZ")]
    """Run folders, of which the first seed's transitions are taken, or .npz files of transitions."""
    preset: Literal["dhmbpo", "paper", "light", "quick"] = "dhmbpo"
    """Whose way of fitting."""
    tries: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="try", metavar="[TITLE:] NAME=VALUE ...")
    ] = ()
    """Other values of it to measure beside it, by names such as fit.batch_size; may be given several times."""
    first: int = 5000
    """Transitions of the first fit."""
    scored_from: int = 10_000
    """From which transition on models are asked about what comes next."""
    last: int = 20_000
    """Up to which."""
    seed: int = 0
    """Of the networks and minibatches."""
    out: Path = Path("bench-model.png")
    """The figure, error against seconds: .png, .svg or .pdf."""
    device: Device = None
    """Where to fit. Default: a GPU if JAX sees one."""
    json: bool = False
    """Print the figures as JSON."""


def run(arguments: list[str]) -> int:
    """Measures, prints a table or JSON, draws."""
    options = parse(BenchModel, "bench-model", _EXAMPLES, arguments)
    require_positive(options, "first", "scored_from", "last")
    if not options.replays:
        raise UserError("no transitions were given: name a run folder or an .npz file.")
    configs = {options.preset: preset(options.preset)} | dict(_tried(options.preset, text) for text in options.tries)
    prepare_jax(options.device, deterministic=False)
    found = _measure(options, configs)
    _draw(found, options.out)
    if options.json:
        plain = {name: {way: dataclasses.asdict(score) for way, score in ways.items()} for name, ways in found.items()}
        print(json.dumps({"figure": str(options.out), "replays": plain}, indent=1))
    else:
        _print_tables(found)
        print(options.out)
    return 0


def _tried(name: str, text: str) -> tuple[str, Config]:
    """A title, which is the text itself if it has none, and the preset with the values that the text names."""
    title, colon, rest = text.partition(": ")
    values: dict[str, Any] = {}
    for part in (rest if colon else text).split():
        key, equals, value = part.partition("=")
        group, _, inner = key.partition(".")
        fields = getattr(getattr(PRESETS[name], group, None), "__dataclass_fields__", {}) if inner else ()
        if not equals or (inner or group) not in (fields or PRESETS[name].__dataclass_fields__):
            raise UserError(f"--try has {part!r}, but NAME=VALUE is needed, with a name such as fit.batch_size.")
        values[key] = written_value(value)
    return title, changed(PRESETS[name], values)


def _measure(options: BenchModel, configs: dict[str, Config]) -> dict[str, dict[str, "Score"]]:
    """Scores by replay and way of fitting."""
    from doublehorizon.algorithm.devices import find_devices, use_compilation_cache, using
    from doublehorizon.analysis.replay_forward import Plan, num_fits, read_rows, replay_forward

    plan = Plan(options.first, options.scored_from, options.last)
    rows = {str(path): read_rows(path, plan.last + 1000) for path in options.replays}
    use_compilation_cache()
    found: dict[str, dict[str, Score]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with (
        using(find_devices(None, 1)),
        Progress(*columns, console=Console(stderr=True, emoji=False), transient=True) as bar,
    ):
        total = bar.add_task("all", total=len(rows) * sum(num_fits(config, plan) for config in configs.values()))
        for name, transitions in rows.items():
            found[name] = {}
            for way, config in configs.items():
                bar.update(total, description=f"{name}: {way}")
                score = replay_forward(config, transitions, plan, options.seed, lambda: bar.advance(total))
                found[name][way] = score
                if not bar.console.is_terminal:  # where no bar is seen
                    told = f"{name}: {way}: {score.member_rmse:.3f} in {score.seconds:.1f} s"
                    bar.console.print(told, markup=False, highlight=False, soft_wrap=True)
    return found


_TITLES = "members    mean  reward  terminal  5 steps       NLL  NLL of all  disagree  calibration  batches  seconds"


def _print_tables(found: dict[str, dict[str, "Score"]]) -> None:
    """One line for each way of fitting, its name at the end, as it may be long."""
    for name, ways in found.items():
        print(f"{name}\n  {_TITLES}")
        for way, score in ways.items():
            terminal = "-" if math.isnan(score.terminal_reward_rmse) else f"{score.terminal_reward_rmse:.3f}"
            errors = f"{score.member_rmse:7.3f} {score.mean_rmse:7.3f} {score.reward_rmse:7.3f} {terminal:>9}"
            errors += f" {score.open_loop_rmse:8.3f}"
            likelihoods = f"{score.member_nll:9.2f} {score.ensemble_nll:11.2f}"
            trust = f"{score.disagreement:9.3f} {score.calibration:12.2f}"
            print(f"  {errors} {likelihoods} {trust} {score.minibatches:8d} {score.seconds:8.1f}  {way}")


def _draw(found: dict[str, dict[str, "Score"]], path: Path) -> None:
    """Error of single members against the seconds of the fits."""
    from doublehorizon.analysis.figures import COLORS, figure_of, save_figure

    figure, axes = figure_of(len(found))
    for axis, (name, ways) in zip(axes, found.items(), strict=True):
        for color, (way, score) in zip(COLORS * len(ways), ways.items(), strict=False):
            axis.plot(score.seconds, score.member_rmse, "o", color=color, label=textwrap.fill(way, 90))
        axis.set(title=Path(name).stem, xlabel="seconds of the fits", ylabel="RMSE of members on the next steps")
        axis.set_xlim(left=0.0)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", fontsize="small")
    save_figure(figure, path)
