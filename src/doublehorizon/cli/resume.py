"""`doublehorizon resume`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from doublehorizon.atomic_files import read_json
from doublehorizon.cli.options import Device, Replay, StepsIfGiven, TextIfGiven, resume_command
from doublehorizon.cli.parsing import parse
from doublehorizon.cli.train_and_resume import closing_env, functions, report, starting, tracked, with_resume_hint
from doublehorizon.errors import UserError
from doublehorizon.jax_settings import prepare_jax

_EXAMPLES = """Goes on with a run that was stopped, however that happened, from its last checkpoint.

examples:
  doublehorizon resume runs/hopper
  doublehorizon resume runs/hopper --steps 200000
  doublehorizon resume runs/robot --env my_robot:make_env

On a CPU the result is the same, to the last bit, as if the run had never been stopped; on a GPU if it was trained with
--deterministic."""


@dataclass
class Resume:
    """What `doublehorizon resume` takes."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    steps: StepsIfGiven = None
    """Simulator steps per seed in all. Default: as many as the run was started for."""
    env: TextIfGiven = None
    """module:function that makes the environment, if the run was started with one: what a file names is not imported
    unless you name it too."""
    seed_policy: TextIfGiven = None
    """As for train, if the run had one and nothing was learnt yet."""
    reward: TextIfGiven = None
    """As for train, if the run had one."""
    termination_rule: TextIfGiven = None
    """As for train, if the run had one."""
    replay_episodes: Replay = None
    """As for train."""
    device: Device = None
    """Where to learn. Default: a GPU if JAX sees one."""
    tensorboard: bool = False
    """Also write TensorBoard's event files, into RUN/tensorboard."""
    wandb: bool = False
    """Also log to Weights & Biases; WANDB_MODE=offline does without an account."""
    quiet: bool = False
    """Show no progress."""
    json: bool = False
    """Print the result as JSON."""


def run(arguments: list[str]) -> int:
    """Parses, goes on, and says what came out."""
    options = parse(Resume, "resume", _EXAMPLES, arguments)
    prepare_jax(options.device, _is_deterministic(options.run))

    with starting(str(options.run), options.quiet):
        from doublehorizon.api import DHMBPO

        given = functions(options.termination_rule, options.reward, options.seed_policy)
        again = options.replay_episodes
        model = DHMBPO.load(options.run, env=options.env, device=options.device, replay_episodes=again, **given)
    hint = with_resume_hint(model, options.run, options)
    if options.steps is None and model.progress is not None and model.num_timesteps >= model.progress.goal:
        again = resume_command(options.run, model.spec.name, options)
        told = f"{options.run} is complete: it was started for {model.progress.goal} steps. To go on: {again} --steps N"
        print(told, file=sys.stderr)
    with closing_env(model), hint, tracked(options.run, options.tensorboard, options.wandb) as trackers:
        model.resume(options.run, options.steps, progress_bar=not options.quiet, trackers=trackers)
    report(model, options.run, options.json)
    return 0


def _is_deterministic(folder: Path) -> bool:
    """Asked before JAX starts; what is wrong with the folder is reported later, when its checkpoints are read."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder. Give the folder of a run.")
    try:
        about: Any = read_json(folder / "config.json")
        return about["config"]["deterministic"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False
