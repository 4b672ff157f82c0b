"""The live view of a run: a panel on a terminal or in a notebook, plain lines elsewhere, nothing if quiet."""

import time
import warnings
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from doublehorizon.envs.make import EnvSpec

if TYPE_CHECKING:  # it imports JAX, which the view of an experiment does without
    from doublehorizon.algorithm.devices import Devices

_BARS = "▁▂▃▄▅▆▇█"
_MOST_SEEDS = 12  # shown one by one
_FIGURES = {
    "rollout/ep_rew_mean": "training return",
    "model/validation_rmse": "model error",
    "train/ent_coef": "temperature",
    "train/critic_loss": "critic loss",
    "model/epochs": "fit epochs",
    "time/waited_seconds": "seconds that the environment waited",
}


class View:
    """Shows where a run to `total_steps` stands."""

    def __init__(self, name: str, total_steps: int, quiet: bool = False, console: Console | None = None):
        self._name, self._total, self._quiet = name, total_steps, quiet
        self._console = console or Console(stderr=True, emoji=False)
        self._live = Live(self, console=self._console, refresh_per_second=4, transient=False)
        # in a notebook, rich draws into a widget
        can_draw = _has_widgets() if self._console.is_jupyter else self._console.is_terminal
        self._is_live = can_draw and not quiet
        self._begun, self._first = time.monotonic(), 0
        self._step, self._iteration, self._left, self._news = 0, 0, "", "starting"
        self._figures: dict[str, float] = {}
        self._returns: dict[int, dict[int, float]] = {}
        self._last_test = ""
        self._spinner = Spinner("dots")

    def __enter__(self) -> "View":
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._news = ""
            self._live.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def warn(self, line: str) -> None:
        """A line that must be seen: a Python warning where nothing is shown."""
        if self._quiet:
            warnings.warn(line, stacklevel=2)
        self.say(line)

    def begin(self, step: int, iteration: int, returns: dict[int, dict[int, float]]) -> None:
        """The run stands at this step, with these test returns, by step and seed."""
        self._step = self._first = step
        self._iteration = iteration
        self._begun, self._returns = time.monotonic(), dict(returns)

    def phase(self, news: str) -> None:
        """What is being done now."""
        self._news = news

    def advance(
        self,
        step: int,
        iteration: int,
        seconds_left: float | None = None,
        figures: dict[str, float] | None = None,
    ) -> None:
        """The run stands at `step`, and the rest takes at most `seconds_left`, if that is known. Where there is no
        terminal this is a line of its own."""
        self._step, self._iteration = step, iteration
        self._figures |= figures or {}  # an iteration in which no episode ended has no training return
        self._left = "" if seconds_left is None else f"at most {clock(seconds_left)} left"
        if not self._is_live:
            self.say("  ".join(filter(None, [f"{self._name}  step {step}/{self._total}", self._left, *self._lately()])))

    def _lately(self) -> list[str]:
        """The last returns, in training and in the last test."""
        words = []
        if "rollout/ep_rew_mean" in self._figures:
            words.append(f"training return {self._figures['rollout/ep_rew_mean']:.4g}")
        if "time/waited_seconds" in self._figures:
            words.append(f"the environment waited {self._figures['time/waited_seconds']:.1f} s")
        if self._returns:
            step = max(self._returns)
            words.append(f"test return {_mean(self._returns[step]):.4g} at {step}")
        return words

    def estimated(self, seconds: float) -> None:
        """How long the whole run will take, as soon as that is known."""
        hint = ""
        if seconds > 2 * 3600:
            hint = ". The preset light needs far less time on a CPU; a GPU is faster by two orders of magnitude"
        self.say(f"{self._name}  the whole run takes at most about {clock(seconds)} here{hint}")

    def evaluated(self, step: int, returns: dict[int, float], words: str = "") -> None:
        """A test return per seed, and the same in words, such as `with_spread` finds."""
        self._returns[step], self._last_test = returns, words or f"{_mean(returns):.5g}"
        values = list(returns.values())
        seeds = f"; seeds: {min(values):.4g} to {max(values):.4g}" if len(values) > 1 else ""
        if not self._is_live:
            self.say(f"{self._name}  step {step}: test return {self._last_test}{seeds}")

    def __rich__(self) -> RenderableType:
        """The panel: how far, what now, how well."""
        speed = (self._step - self._first) / max(1e-9, time.monotonic() - self._begun)
        head = Table.grid(padding=(0, 2))
        for _ in range(4):
            head.add_column(no_wrap=True)
        head.add_row(
            Text(self._name, style="bold"),
            ProgressBar(total=self._total, completed=self._step, width=24 if self._console.width >= 100 else 10),
            f"{self._step:,} of {self._total:,} steps",
            self._left,
        )
        parts: list[RenderableType] = [head]
        if self._news:
            self._spinner.update(text=self._news)
            parts.append(self._spinner)
        figures = [f"iteration {self._iteration}"]
        figures += [f"{speed:.0f} steps/s"] if self._step > self._first else []
        figures += [f"{name} {self._figures[key]:.4g}" for key, name in _FIGURES.items() if key in self._figures]
        parts.append(Text("   ".join(figures), style="dim"))
        if self._returns:
            parts.append(self._test_returns())
        return Group(*parts)

    def _test_returns(self) -> Table:
        steps = sorted(self._returns)
        last = self._returns[steps[-1]]
        table = Table.grid(padding=(0, 2))
        curves = {"test return": [_mean(self._returns[step]) for step in steps]}
        if 1 < len(last) <= _MOST_SEEDS:
            curves |= {
                f"seed {seed}": [self._returns[s][seed] for s in steps if seed in self._returns[s]] for seed in last
            }
        for name, values in curves.items():
            where = f"at {steps[-1]:,}" if name == "test return" else ""
            shown = (self._last_test if name == "test return" else "") or f"{values[-1]:.5g}"
            table.add_row(name, Text(sparkline(values), style="cyan"), shown, where)
        return table


def introduction(spec: EnvSpec, num_seeds: int, iteration_steps: int, total: int, devices: "Devices") -> str:
    """What a run is about, in a line."""
    ends = "never, but by the time limit" if spec.rule is None else "by a known rule (checked against every step)"
    if spec.termination == "learned":
        ends = "as the model learns"
    count = f"{len(devices)} x " if len(devices) > 1 else ""
    return (
        f"{spec.name}: {spec.obs_size} observations, {spec.act_size} actions; episodes end {ends}; {num_seeds} seed(s) "
        f"to {total} steps, whole iterations of {iteration_steps}, on {count}{devices[0].device_kind}"
    )


def single_env_note(name: str, can_pause: bool, episodes: int, extra_steps: int) -> str:
    """What happens to the only environment of a run, which may be a machine: when it waits, and what steps it makes
    beside those of training, in test episodes."""
    when = "paused" if can_pause else "which begins when the current episode has ended"
    tests = "No test episodes; --loop.evaluation-episodes N runs N per evaluation"
    if episodes > 0:
        tests = f"{episodes} test episodes per evaluation, up to {extra_steps} steps beside those of training"
    return f"{name} is idle while the agent learns, {when}. {tests}"


def sparkline(values: list[float], width: int = 24) -> str:
    """A curve in one line of text: the last values, from the lowest to the highest."""
    shown = values[-width:]
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)


def with_spread(returns: dict[int, float], spreads: dict[int, float], episodes: int) -> str:
    """A test return with its standard deviation: over the seeds or, of a single one, over its episodes."""
    values = list(returns.values())
    if len(values) > 1:
        what = f"std over {len(values)} seeds, {episodes} episodes each"
        return f"{_mean(returns):.5g} ± {np.std(values, ddof=1):.3g} ({what})"
    if not spreads:
        return f"{_mean(returns):.5g} ({episodes} episode{'s' if episodes != 1 else ''})"
    return f"{_mean(returns):.5g} ± {next(iter(spreads.values())):.3g} (std over {episodes} episodes)"


def _mean(returns: dict[int, float]) -> float:
    return sum(returns.values()) / len(returns)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"


def _has_widgets() -> bool:
    try:
        import_module("ipywidgets")
    except ImportError:
        return False
    return True
