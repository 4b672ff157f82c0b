"""`doublehorizon eval`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.progress import track

from doublehorizon.acting.env_runner import EnvRunner
from doublehorizon.cli.options import TextIfGiven, require_positive
from doublehorizon.cli.parsing import parse
from doublehorizon.run.run_reader import read_run

_EXAMPLES = """Tests the policies of a run in new episodes, with their most likely actions.

examples:
  doublehorizon eval runs/hopper
  doublehorizon eval runs/hopper --episodes 100 --seeds 0 3 --json
  doublehorizon eval runs/lander --best --episodes 100
  doublehorizon eval runs/robot --env my_robot:make_env"""


@dataclass
class Eval:
    """What `doublehorizon eval` takes."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    episodes: int = 10
    """Test episodes per seed."""
    seeds: tuple[int, ...] = ()
    """Whose policies. Default: all."""
    best: bool = False
    """Instead of the seeds' last policies, the one with the best test return of the whole run."""
    first: int = 0
    """Number of the first episode: others begin elsewhere."""
    env: TextIfGiven = None
    """module:function that makes the environment, if the run was trained on one; or another environment with the same
    spaces."""
    json: bool = False
    """Print the figures as JSON."""


def run(arguments: list[str]) -> int:
    """Parses, tests, and prints mean and spread."""
    options = parse(Eval, "eval", _EXAMPLES, arguments)
    require_positive(options, "episodes")
    found = read_run(options.run)
    policies = found.chosen_policies(options.seeds, options.best)
    simulator = found.simulator(options.env)
    returns: dict[str, list[float]] = {name: [] for name in policies}
    jobs = [(name, options.first + episode) for name in policies for episode in range(options.episodes)]
    try:
        for name, episode in track(jobs, "testing", console=Console(stderr=True, emoji=False), transient=True):
            seed, policy = policies[name]
            returns[name].append(EnvRunner(simulator, seed).evaluate(episode, policy, 1))
    finally:
        simulator.close()
    if options.json:
        print(json.dumps({"run": str(options.run), "env": simulator.spec.name, "returns": returns}))
        return 0
    for name, values in returns.items():
        print(f"{name if options.best else f'seed {name}'}: {_words(values)}")
    if len(returns) > 1:
        print(f"all: {_words([float(np.mean(values)) for values in returns.values()])} over {len(returns)} seeds")
    return 0


def _words(values: list[float]) -> str:
    spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{spread}"
