"""What all commands ask of their options. It imports no simulator: some say first how that shall draw."""

from collections.abc import Mapping
from typing import Any

from doublehorizon.errors import UserError


def require_positive(options: Any, *names: str) -> None:
    """Those options must be at least 1, if they are given."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}, but at least 1 is needed.")


def usage(call: str, purpose: str, choices: Mapping[str, str], example: str) -> str:
    """Help of a command that only chooses among others, by name and what they are for."""
    width = max(map(len, choices))
    lines = [f"  {name:<{width}} {what}" for name, what in choices.items()]
    return "\n".join([f"usage: {call} ...", "", purpose, "", *lines, "", example])
