"""What all commands ask of their options. It imports no simulator: some say first how that shall draw."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from doublehorizon.errors import UserError


def _whole_number(text: str) -> int:
    """Also as people write large ones: 1e5, 100_000."""
    try:
        number = float(text)
    except ValueError:
        number = 0.5
    if not number.is_integer():
        raise ValueError(f"{text} is no whole number")
    return int(number)


Steps = Annotated[
    int,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: _whole_number(words[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    ),
]
"""A number of steps on the command line."""


def _if_given(metavar: str) -> Any:
    """An option without a default value: its words say what happens without it."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


PathIfGiven = Annotated[Path | None, _if_given("PATH")]
TextIfGiven = Annotated[str | None, _if_given("TEXT")]
IntIfGiven = Annotated[int | None, _if_given("INT")]
FloatIfGiven = Annotated[float | None, _if_given("FLOAT")]
StepsIfGiven = Annotated[Steps | None, _if_given("INT")]
Replay = Annotated[Literal["auto", "never"] | None, _if_given("{auto,never}")]
Device = Annotated[Literal["cpu", "gpu"] | None, _if_given("{cpu,gpu}")]


def require_positive(options: Any, *names: str) -> None:
    """Those options must be at least 1, if they are given."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}, but at least 1 is needed.")


def resume_command(folder: Path | str, env: str, options: Any = None) -> str:
    """The whole command by which a run goes on: with the functions that it was started with, as `train` names them."""
    words = ["doublehorizon", "resume", str(folder), *(["--env", env] if ":" in env else [])]
    for name in ("seed_policy", "reward", "termination_rule"):
        value = getattr(options, name, None)
        words += [] if value is None else [f"--{name.replace('_', '-')}", value]
    return shlex.join(words)


def usage(call: str, purpose: str, choices: Mapping[str, str], example: str) -> str:
    """Help of a command that only chooses among others, by name and what they are for."""
    width = max(map(len, choices))
    lines = [f"  {name:<{width}} {what}" for name, what in choices.items()]
    return "\n".join([f"usage: {call} ...", "", purpose, "", *lines, "", example])
