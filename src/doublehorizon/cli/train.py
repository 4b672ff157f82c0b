"""`doublehorizon train`."""

import dataclasses
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from doublehorizon.config import PRESETS, Config, preset
from doublehorizon.errors import UserError

_EXAMPLES = """Trains DHMBPO on an environment and writes a run folder.

examples:
  doublehorizon train Pendulum-v1 --preset quick --steps 2000
  doublehorizon train paper/HalfCheetah --steps 100000 --seeds 8
  doublehorizon train Hopper-v5 --horizons.distribution 40 --out runs/hopper-40

The run folder holds config.json, eval.csv (test returns), progress.csv (losses and times) and, at the end, each
seed's policy as policy/seed<k>.safetensors."""


@dataclass
class Train:
    """What `doublehorizon train` takes."""

    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]
    """A Gymnasium id (Pendulum-v1, Hopper-v5, ...), or paper/X, X being HalfCheetah, Hopper, Walker2d, Ant or
    Humanoid."""
    steps: int = 100_000
    """Environment steps per seed, the first random ones included."""
    seeds: int = 1
    """How many seeds to train side by side, in one process on one device."""
    seed: int = 0
    """The first seed."""
    preset: Literal["dhmbpo", "paper", "light", "quick"] = "dhmbpo"
    """Where the numbers below start from: dhmbpo is the paper's algorithm with shorter late fits, paper has its own
    fits and precision, light suits a CPU, quick a CPU and a small task."""
    out: Path | None = None
    """The run folder. Default: runs/ENV-DATE-TIME."""
    device: Literal["cpu", "gpu"] | None = None
    """Where to learn. Default: a GPU if JAX sees one."""
    quiet: bool = False
    """Show no progress."""
    json: bool = False
    """Print the result as JSON."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def run(arguments: list[str]) -> int:
    """Parses, trains, and says what came out."""
    default = Train(env="", config=preset(_preset_named_in(arguments)))
    options = tyro.cli(
        Train,
        prog="doublehorizon train",
        description=_EXAMPLES,
        args=arguments,
        default=dataclasses.replace(default, env=tyro.MISSING),
    )
    for name, value in (("steps", options.steps), ("seeds", options.seeds)):
        if value < 1:
            raise UserError(f"--{name} is {value}, but at least 1 is needed.")
    if options.device is not None:  # must be said before JAX starts
        os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda"}[options.device]
    folder = options.out or _default_folder(options.env)

    from doublehorizon.api import DHMBPO

    model = DHMBPO(options.env, seed=options.seed, seeds=options.seeds, config=options.config, device=options.device)
    random_steps = model.random_timesteps
    if options.steps < random_steps:
        raise UserError(
            f"--steps is {options.steps}, but training begins with {random_steps} random steps and learns after them. "
            "Ask for more steps, or for fewer random ones with --loop.seed-iterations."
        )
    model.learn(options.steps, out=folder, progress_bar=not options.quiet)
    _report(model.last_returns(), folder, options.json)
    return 0


def _preset_named_in(arguments: list[str]) -> str:
    """The preset's values are the defaults that the parser then shows and overrides, so it is looked up first."""
    for here, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if here == "--preset":
            return following
        if here.startswith("--preset="):
            return here.removeprefix("--preset=")
    return next(iter(PRESETS))


def _default_folder(env: str) -> Path:
    name = env.replace("/", "-").replace(":", "-")
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _report(returns: dict[int, float], folder: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"run": str(folder), "returns": returns}))
        return
    if returns:
        mean = sum(returns.values()) / len(returns)
        print(f"final test return: {mean:.5g} (mean of {len(returns)} seed(s))")
    print(f"run folder: {folder}")
