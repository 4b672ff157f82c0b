"""What can go wrong, reported so that someone can act on it."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the user can mend. The message says what was given, what is needed and what to do."""


class RunError(RuntimeError):
    """A run that could not go on for a reason outside of this package, such as an environment that raised."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """An unknown name, with the nearest known one."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UserError(f"there is no {kind} {name!r}.{hint} Choose one of: {', '.join(names)}.")
