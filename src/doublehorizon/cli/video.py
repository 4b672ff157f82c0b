"""`doublehorizon video`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import Progress

from doublehorizon.atomic_files import refuse_links
from doublehorizon.cli.options import PathIfGiven, TextIfGiven, require_positive
from doublehorizon.cli.parsing import parse

_EXAMPLES = """Films the policies of a run: RUN/video/seed<k>.mp4, without a display.

examples:
  doublehorizon video runs/hopper
  doublehorizon video runs/hopper --seeds 0 --episodes 3 --out videos"""


@dataclass
class Video:
    """What `doublehorizon video` takes."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    episodes: int = 1
    """Episodes per seed, one after the other in one video."""
    seeds: tuple[int, ...] = ()
    """Whose policies. Default: all."""
    best: bool = False
    """Instead of the seeds' last policies, the one with the best test return of the whole run: RUN/video/best.mp4."""
    out: PathIfGiven = None
    """The folder for the videos. Default: RUN/video."""
    env: TextIfGiven = None
    """module:function that makes the environment, if the run was trained on one; it is called with
    render_mode="rgb_array" if it takes that."""


def run(arguments: list[str]) -> int:
    """Parses, records, and names the files."""
    options = parse(Video, "video", _EXAMPLES, arguments)
    require_positive(options, "episodes")
    _render_without_display()

    from doublehorizon.analysis.video import record_video
    from doublehorizon.run.run_reader import read_run

    found = read_run(options.run)
    policies = found.chosen_policies(options.seeds, options.best)
    folder = options.out or options.run / "video"
    if options.out is None:
        refuse_links(options.run)
    with Progress(console=Console(stderr=True, emoji=False), transient=True) as bar:
        for name, (seed, policy) in policies.items():
            label = name if options.best else f"seed {name}"
            task = bar.add_task(f"recording {label}", total=None)
            path = folder / f"{label.replace(' ', '')}.mp4"
            shown = (found, seed, policy, path, options.episodes, options.env)
            total = record_video(*shown, lambda t=task: bar.advance(t))
            bar.remove_task(task)
            print(f"{path}  (return {total:.1f})")
    return 0


def _render_without_display() -> None:
    """Must be said before a simulator is imported: draw into memory, where there is no screen."""
    if not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL")):
        os.environ["MUJOCO_GL"] = "egl"
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
