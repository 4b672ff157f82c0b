"""`doublehorizon experiment`."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from doublehorizon.cli.config_help import show_help
from doublehorizon.cli.options import Device, FloatIfGiven, PathIfGiven, Steps, require_positive
from doublehorizon.cli.parsing import parse
from doublehorizon.cli.train import config_named_in
from doublehorizon.config import Config
from doublehorizon.errors import UserError
from doublehorizon.experiments.experiment_view import ExperimentView
from doublehorizon.experiments.jobs import Job, is_done
from doublehorizon.experiments.launchers import Resources, failure, run_locally, run_on_ray
from doublehorizon.experiments.paper_experiments import EXPERIMENTS, TASKS, jobs_of, paper_experiment
from doublehorizon.presets import refuse_renamed
from doublehorizon.signals import stoppable

_LIST = "\n".join(f"  {name:<13} {chosen.question}" for name, chosen in EXPERIMENTS.items())
_EXAMPLES = f"""Runs one of the paper's experiments: each variant on each task, then a table and a figure. What was
stopped goes on where it was when the same command is given again.

experiments:
{_LIST}

examples:
  doublehorizon experiment ablation --tasks paper/Hopper paper/Walker2d --steps 50000 --seeds 5
  doublehorizon experiment tr-horizon --tasks Pendulum-v1 --preset quick --steps 2000 --seeds 3
  doublehorizon experiment utd --reference FOLDER        # the authors' results/ beside our own curves
  doublehorizon experiment ablation --on ray:auto        # on the Ray cluster that this machine belongs to"""


@dataclass
class ExperimentOptions:
    """What `doublehorizon experiment` takes, but for the numbers of the algorithm."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Which experiment."""
    tasks: tuple[str, ...] = TASKS
    """Environments, named as in train."""
    steps: Steps = 100_000
    """Simulator steps per seed."""
    seeds: int = 8
    """Seeds of each variant, side by side."""
    seed: int = 0
    """The first seed."""
    variants: tuple[str, ...] = ()
    """Some of the experiment's variants. Default: all."""
    preset: Literal["dhmbpo", "paper", "light", "quick"] = "paper"
    """What all variants start from; published curves are those of the paper's settings."""
    out: PathIfGiven = None
    """The folder for all runs, the table and the figure. Default: experiments/NAME."""
    reference: PathIfGiven = None
    """A folder of published curves, laid out as the authors' results: gym/esvg/Hopper.csv and so on."""
    on: str = "here"
    """Where: here, one run after another; ray, a Ray cluster on this machine; ray:ADDRESS, another one."""
    gpus: FloatIfGiven = None
    """GPUs that each run asks of a Ray cluster. Default: 1 if it has any."""
    cores: FloatIfGiven = None
    """CPU cores that each run asks of a Ray cluster. Default: one per seed, as far as a node has them."""
    device: Device = None
    """Where to learn. Default: a GPU if JAX sees one."""
    quiet: bool = False
    """Show no progress."""
    json: bool = False
    """Print the table as JSON."""


@dataclass
class Experiment(ExperimentOptions):
    """What `doublehorizon experiment` takes."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def run(arguments: list[str]) -> int:
    """Parses, runs what is missing, and sums up."""
    default = Experiment(name="", config=config_named_in(arguments, "paper"))
    if show_help(ExperimentOptions, "experiment", _EXAMPLES, arguments, default.config):
        return 0
    default.name = tyro.MISSING
    options = parse(Experiment, "experiment", _EXAMPLES, arguments, default)
    chosen, jobs = paper_experiment(options.name), _jobs(options)
    root = options.out or Path("experiments") / options.name
    todo = [job for job in jobs if not is_done(job, root / job.name)]
    with stoppable(), ExperimentView(jobs, root, options.quiet) as view:
        for job in jobs:
            if job not in todo:
                view.update(job.name, "done", "before")
        problems = _run(options, todo, root, view)

    from doublehorizon.analysis import experiment_results

    found = experiment_results.gather(jobs, root, chosen, options.reference)
    if found.lines:
        experiment_results.draw(found, f"{options.name}: {chosen.question}", root / "curves.png")
        experiment_results.write_table(found, root / "results.csv")
        print(
            experiment_results.as_json(found)
            if options.json
            else f"{experiment_results.table(found)}\n{root / 'curves.png'}"
        )
    if problems:
        raise failure(problems, len(jobs))
    return 0


def _jobs(options: Experiment) -> list[Job]:
    require_positive(options, "steps", "seeds")
    if not options.tasks:
        raise UserError("there is no task to run on: give at least one with --tasks.")
    chosen = paper_experiment(options.name)
    for name in options.variants:
        refuse_renamed(name)
    unknown = [name for name in options.variants if name not in chosen.variants]
    if unknown:
        raise UserError(f"{options.name} has no variant {unknown[0]!r}. It has: {', '.join(chosen.variants)}.")
    shared = {name: getattr(options, name) for name in ("steps", "seeds", "seed", "device")}
    jobs = jobs_of(chosen, options.config, options.tasks, **shared)
    twice = [name for name, count in Counter(job.name for job in jobs).items() if count > 1]
    if twice:
        raise UserError(f"two runs would be in the folder {twice[0]}: name each task once.")
    return [job for job in jobs if not options.variants or job.variant in options.variants]


def _run(options: Experiment, todo: list[Job], root: Path, view: ExperimentView) -> dict[str, str]:
    where, _, address = options.on.partition(":")
    if where == "here" and not address:
        return run_locally(todo, root, view)
    if where != "ray":
        raise UserError(f"--on is {options.on!r}, but it must be here, ray or ray:ADDRESS.")
    return run_on_ray(todo, root, view, address or None, Resources(options.gpus, options.cores))
