"""What all commands ask of their options. It imports no simulator: some say first how that shall draw."""

from typing import Any

from doublehorizon.errors import UserError


def require_positive(options: Any, *names: str) -> None:
    """Those options must be at least 1, if they are given."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}, but at least 1 is needed.")
