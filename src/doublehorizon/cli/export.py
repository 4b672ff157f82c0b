"""`doublehorizon export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from doublehorizon.acting.policy import load_policy
from doublehorizon.analysis.export import export_policy
from doublehorizon.cli.options import IntIfGiven
from doublehorizon.cli.parsing import parse
from doublehorizon.errors import UserError
from doublehorizon.run.run_reader import read_run

_EXAMPLES = """Writes a trained policy for machines that do not have this package.

examples:
  doublehorizon export runs/hopper policy.onnx            # for ONNX Runtime and all that reads its format
  doublehorizon export runs/hopper policy.npz             # NumPy arrays, and policy.py, which runs them
  doublehorizon export runs/hopper policy.onnx --seed 3
  doublehorizon export runs/lander policy.onnx --best     # the best of all its tests, not only of the last ones

Either takes the environment's own observations and gives actions in the environment's own units. Where observations
have names or parts, they are printed in their order, with their shapes."""


@dataclass
class Export:
    """What `doublehorizon export` takes."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, or a policy file."""
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Where to: its name ends in .onnx or .npz."""
    seed: IntIfGiven = None
    """Whose policy. Default: that of the seed with the best last test return."""
    best: bool = False
    """The policy with the best test return of the whole run."""


def run(arguments: list[str]) -> int:
    """Parses, writes, and names the files."""
    options = parse(Export, "export", _EXAMPLES, arguments)
    if options.best and options.seed is not None:
        raise UserError(f"--best is one policy of all seeds, so --seed {options.seed} cannot be given with it.")
    if options.seed is None:
        policy = load_policy(options.run, options.best)
    else:
        policy = read_run(options.run).policies([options.seed])[options.seed]
    try:
        written = export_policy(policy, options.file)
    except OSError as problem:
        raise UserError(f"{options.file} cannot be written: {problem.strerror}.") from problem
    for path in written:
        print(path)
    if policy.layout is not None:
        print(f"observation: {policy.layout}")
    return 0
