"""`doublehorizon train`."""

import dataclasses
import time
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from doublehorizon.cli.config_help import show_help
from doublehorizon.cli.options import (
    Device,
    FloatIfGiven,
    IntIfGiven,
    PathIfGiven,
    Replay,
    Steps,
    TextIfGiven,
    require_positive,
)
from doublehorizon.cli.parsing import parse
from doublehorizon.cli.train_and_resume import closing_env, functions, report, starting, tracked, with_resume_hint
from doublehorizon.config import Config
from doublehorizon.config_json import changed, read_config
from doublehorizon.errors import UserError
from doublehorizon.jax_settings import prepare_jax
from doublehorizon.presets import preset

if TYPE_CHECKING:
    from doublehorizon.api import DHMBPO

_EXAMPLES = """Trains DHMBPO on an environment and writes a run folder.

examples:
  doublehorizon train Pendulum-v1 --preset quick --steps 2000
  doublehorizon train paper/HalfCheetah --steps 100000 --seeds 8
  doublehorizon train dmc/cheetah-run --steps 100000 --seeds 4
  doublehorizon train my_robot:make_env --preset light --data log.npz
  doublehorizon train Hopper-v5 --horizons.distribution 20 --out runs/hopper-20

The run folder holds config.json, eval.csv (test returns), progress.csv (losses and times), each seed's policy as
policy/seed<k>.safetensors, the one with the best test as policy/best.safetensors, and checkpoints. A run that was
stopped goes on with: doublehorizon resume RUN"""


@dataclass
class TrainOptions:
    """What `doublehorizon train` takes, but for the numbers of the algorithm."""

    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]
    """A Gymnasium id (Pendulum-v1, Hopper-v5, ...); dmc/DOMAIN-TASK, such as dmc/cheetah-run; paper/X, X being
    HalfCheetah, Hopper, Walker2d, Ant or Humanoid; or module:function, which makes an environment of your own."""
    steps: Steps = 100_000
    """Simulator steps per seed, the first random ones included."""
    seeds: int = 1
    """How many seeds to train side by side, in one process."""
    seed: int = 0
    """The first seed."""
    preset: Literal["dhmbpo", "paper", "light", "quick", "no-dr", "no-tr", "sac"] = "dhmbpo"
    """Where the numbers of the algorithm start from. paper: the published algorithm; light: for a CPU; quick: for a CPU
    and a small task; no-dr, no-tr, sac: the paper's ablations."""
    config_file: Annotated[Path | None, tyro.conf.arg(name="config", metavar="PATH", help_behavior_hint="")] = None
    """A file of numbers to start from instead of a preset: config.json of a run, or what tune wrote."""
    out: PathIfGiven = None
    """The run folder. Default: runs/ENV-DATE-TIME."""
    updates_per_step: FloatIfGiven = None
    """Updates of critic and actor per environment step. Default: 2; 1 with any other preset."""
    num_envs: IntIfGiven = None
    """Environments per seed that collect side by side, for slow simulators. Default: 1."""
    single_env: bool = False
    """For real hardware: one environment, idle while the agent learns; no test episodes."""
    checkpoint_every: IntIfGiven = None
    """Iterations between checkpoints. Default: as often as takes a twentieth of the time."""
    replay_episodes: Replay = None
    """never: resume repeats no actions that were done before."""
    data: TextIfGiven = None
    """Transitions to learn from first: an .npz file or minari:DATASET."""
    seed_policy: TextIfGiven = None
    """Acts before the first fit instead of random actions: module:function, from observation to action, or a policy
    file."""
    reward: TextIfGiven = None
    """module:function, your own reward from obs, act and next_obs, instead of a learnt one."""
    termination_rule: TextIfGiven = None
    """module:function, your own rule from next_obs to flags."""
    check: bool = True
    """Let Gymnasium's check_env look at an environment of your own first; it steps it a few times."""
    device: Device = None
    """Where to learn. Default: a GPU if JAX sees one."""
    tensorboard: bool = False
    """Also write TensorBoard's event files, into RUN/tensorboard."""
    wandb: bool = False
    """Also log to Weights & Biases (offline with WANDB_MODE=offline)."""
    quiet: bool = False
    """Show no progress."""
    json: bool = False
    """Print the result as JSON."""


@dataclass
class Train(TrainOptions):
    """What `doublehorizon train` takes."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def run(arguments: list[str]) -> int:
    """Parses, trains, and says what came out."""
    default = Train(env="", config=config_named_in(arguments))
    if show_help(TrainOptions, "train", _EXAMPLES, arguments, default.config):
        return 0
    options = parse(Train, "train", _EXAMPLES, arguments, dataclasses.replace(default, env=tyro.MISSING))
    require_positive(options, "steps", "seeds", "num_envs", "checkpoint_every")
    prepare_jax(options.device, options.config.deterministic)
    folder = options.out or _default_folder(options.env)

    with starting(options.env, options.quiet):
        from doublehorizon.api import DHMBPO

        model = DHMBPO(
            options.env,
            seed=options.seed,
            seeds=options.seeds,
            config=_config(options),
            device=options.device,
            data=options.data,
            check=options.check and not options.config.loop.single_env and not options.single_env,
            **functions(options.termination_rule, options.reward, options.seed_policy),
        )
    with closing_env(model):
        _require_learning(model, options.steps)
        hint, logs = with_resume_hint(model, folder, options), tracked(folder, options.tensorboard, options.wandb)
        with hint, logs as trackers:
            model.learn(options.steps, out=folder, progress_bar=not options.quiet, trackers=trackers)
    report(model, folder, options.json)
    return 0


def _require_learning(model: "DHMBPO", steps: int) -> None:
    """A run that would end before it learns is a mistake."""
    random = model.random_timesteps
    if steps < random:
        raise UserError(
            f"--steps is {steps}, but training begins with {random} random steps and learns after them. "
            "Ask for more steps, or for fewer random ones with --loop.seed-iterations."
        )


def _config(options: Train) -> Config:
    named = {
        "loop.single_env": options.single_env or None,
        "loop.num_envs": options.num_envs,
        "loop.checkpoint_every": options.checkpoint_every,
        "loop.replay_episodes": options.replay_episodes,
        "policy.updates_per_step": options.updates_per_step,
    }
    return changed(options.config, {name: value for name, value in named.items() if value is not None})


def config_named_in(arguments: list[str], default: str = "dhmbpo") -> Config:
    """Its values are the defaults that the parser then shows and overrides, so they are looked up first: those of a
    file or of a preset."""
    name, file = _value_of("--preset", arguments), _value_of("--config", arguments)
    if file is None:
        return preset(name or default)
    return read_config(Path(file), None if name is None else preset(name))


def _value_of(option: str, arguments: list[str]) -> str | None:
    for here, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        if here == option:
            return following
        if here.startswith(f"{option}="):
            return here.removeprefix(f"{option}=")
    return None


def _default_folder(env: str) -> Path:
    name = env.replace("/", "-").replace(":", "-")
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
