"""Draws `docs/img/live.svg`: the live view of a run that really happens, as it looks after 2,600 of 3,000 steps.

python docs/live.py
"""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from rich.console import Console

import doublehorizon as dh
from doublehorizon.training.live_view import View

SHOWN_AT = 2600


class Sitter(View):
    """A view that has its picture taken."""

    def advance(self, step: int, *figures) -> None:
        super().advance(step, *figures)
        if step == SHOWN_AT:
            paper = Console(record=True, width=100, force_terminal=True)
            paper.print(self)
            paper.save_svg(str(Path(__file__).parent / "img" / "live.svg"), title="doublehorizon train")


config = replace(dh.presets.quick, loop=replace(dh.presets.quick.loop, evaluate_every=1))
with patch("doublehorizon.api.View", Sitter):
    dh.DHMBPO("Pendulum-v1", seeds=4, config=config).learn(3000, progress_bar=True)
