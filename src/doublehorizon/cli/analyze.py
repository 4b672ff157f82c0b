"""`doublehorizon analyze`: what each analysis takes, and where it goes on."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import tyro

from doublehorizon.cli.options import Device, PathIfGiven, TextIfGiven, usage
from doublehorizon.cli.train_and_resume import function
from doublehorizon.errors import unknown
from doublehorizon.jax_settings import prepare_jax

ANALYSES = {
    "critic-error": "how fast critics learn the true value, with and without distribution rollouts",
    "model": "the model's error on training, held-out and later data, and over many steps",
    "targets": "histograms of rewards and critic targets over training, with the bounds of Q",
}

_EXAMPLE = """`doublehorizon analyze WHAT --help` tells more. For example:

  doublehorizon analyze model runs/hopper"""


@dataclass
class Analyze:
    """What all analyses take."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder, or one that save() wrote."""
    seeds: tuple[int, ...] = ()
    """Which of its seeds. Default: all."""
    out: PathIfGiven = None
    """The figure: .png, .svg or .pdf. Default: one in the run folder."""
    env: TextIfGiven = None
    """module:function that makes the environment, if the run was trained on one."""
    termination_rule: TextIfGiven = None
    """module:function, if the run was given one."""
    reward: TextIfGiven = None
    """module:function, if the run was given one."""
    device: Device = None
    """Where to compute. Default: a GPU if JAX sees one."""
    json: bool = False
    """Print the figures as JSON."""

    def needed(self) -> dict[str, Any]:
        """What `DHMBPO.load` needs, by its argument names; called before JAX is imported."""
        prepare_jax(self.device, deterministic=False)
        return {
            "env": self.env,
            "termination_rule": function(self.termination_rule, "says of next observations whether they end"),
            "reward": function(self.reward, "returns rewards"),
        }

    def figure(self, name: str) -> Path:
        return self.out or self.run / f"{name}.png"


def run(arguments: list[str]) -> int:
    """Hands over to the analysis that is named."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage("doublehorizon analyze WHAT RUN", "Looks into a saved run, on CPU or GPU.", ANALYSES, _EXAMPLE))
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in ANALYSES:
        raise unknown("analysis", name, ANALYSES)
    return import_module(f"doublehorizon.cli.analyze_{name.replace('-', '_')}").run(rest)
