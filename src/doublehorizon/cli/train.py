"""`doublehorizon train`."""

import dataclasses
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from doublehorizon.config import PRESETS, Config, preset
from doublehorizon.envs.make import imported
from doublehorizon.errors import UserError

_EXAMPLES = """Trains DHMBPO on an environment and writes a run folder.

examples:
  doublehorizon train Pendulum-v1 --preset quick --steps 2000
  doublehorizon train paper/HalfCheetah --steps 100000 --seeds 8
  doublehorizon train dmc/cheetah-run --steps 100000 --seeds 4
  doublehorizon train my_robot:make_env --preset light --data log.npz
  doublehorizon train Hopper-v5 --horizons.distribution 40 --out runs/hopper-40

The run folder holds config.json, eval.csv (test returns), progress.csv (losses and times) and, at the end, each
seed's policy as policy/seed<k>.safetensors."""


@dataclass
class Train:
    """What `doublehorizon train` takes."""

    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]
    """A Gymnasium id (Pendulum-v1, Hopper-v5, ...); dmc/DOMAIN-TASK, such as dmc/cheetah-run; paper/X, X being
    HalfCheetah, Hopper, Walker2d, Ant or Humanoid; or module:function, which makes an environment of your own."""
    steps: int = 100_000
    """Simulator steps per seed, the first random ones included."""
    seeds: int = 1
    """How many seeds to train side by side, in one process."""
    seed: int = 0
    """The first seed."""
    preset: Literal["dhmbpo", "paper", "light", "quick"] = "dhmbpo"
    """Where the numbers below start from: dhmbpo is the paper's algorithm with shorter late fits, paper has its own
    fits and precision, light suits a CPU, quick a CPU and a small task."""
    out: Path | None = None
    """The run folder. Default: runs/ENV-DATE-TIME."""
    num_envs: int | None = None
    """Environments per seed that collect side by side, for slow simulators. Default: 1."""
    data: str | None = None
    """Transitions to learn from before the first step instead of random ones: an .npz file with the arrays obs, act,
    reward, next_obs and terminated, or minari:DATASET."""
    seed_policy: str | None = None
    """Acts instead of chance before the first fit: module:function, from observation to action, or a policy file."""
    reward: str | None = None
    """module:function, your own reward from obs, act and next_obs, instead of a learnt one."""
    termination_rule: str | None = None
    """module:function, your own rule from next_obs to flags."""
    check: bool = True
    """Let Gymnasium's check_env look at an environment of your own first; it steps it a few times."""
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
    for name, value in (("steps", options.steps), ("seeds", options.seeds), ("num-envs", options.num_envs)):
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}, but at least 1 is needed.")
    if options.device is not None:  # must be said before JAX starts
        os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda"}[options.device]
    folder = options.out or _default_folder(options.env)

    from doublehorizon.api import DHMBPO

    model = DHMBPO(
        options.env,
        seed=options.seed,
        seeds=options.seeds,
        config=_config(options),
        device=options.device,
        termination_rule=_function(options.termination_rule, "says of next observations whether they end an episode"),
        reward=_function(options.reward, "returns rewards"),
        data=options.data,
        seed_policy=_seed_policy(options.seed_policy),
        check=options.check,
    )
    random_steps = model.random_timesteps
    if options.steps < random_steps:
        raise UserError(
            f"--steps is {options.steps}, but training begins with {random_steps} random steps and learns after them. "
            "Ask for more steps, or for fewer random ones with --loop.seed-iterations."
        )
    model.learn(options.steps, out=folder, progress_bar=not options.quiet)
    _report(model.last_returns(), folder, options.json)
    return 0


def _config(options: Train) -> Config:
    if options.num_envs is None:
        return options.config
    loop = dataclasses.replace(options.config.loop, num_envs=options.num_envs)
    return dataclasses.replace(options.config, loop=loop)


def _function(name: str | None, purpose: str) -> Callable | None:
    if name is not None and ":" not in name:
        raise UserError(f"{name!r} names no function. Write module:function, one that {purpose}.")
    return None if name is None else imported(name, purpose)


def _seed_policy(name: str | None) -> Any:
    """A file, or module:function."""
    if name is None or Path(name).exists() or ":" not in name:
        return name
    return _function(name, "returns an action for an observation")


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
