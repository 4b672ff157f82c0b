"""Checks a record of settings against its own annotations: type, choices, range."""

import dataclasses
import math
import numbers
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Interval, Le, Lt

from doublehorizon.errors import UserError

Count = Annotated[int, Ge(1)]
"""One or more."""
CountOrZero = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(ge=0, le=1)]
Dropout = Annotated[float, Interval(ge=0, lt=1)]
MovingRate = Annotated[float, Interval(gt=0, le=1)]
"""How far an average moves with each step."""

_LIMITS = {
    Gt: ("gt", "more than", lambda value, limit: value > limit),
    Ge: ("ge", "at least", lambda value, limit: value >= limit),
    Lt: ("lt", "below", lambda value, limit: value < limit),
    Le: ("le", "at most", lambda value, limit: value <= limit),
}


def check_fields(record: Any, prefix: str = "") -> None:
    """Raises a `UserError` about the first field, of the record or of the records inside, whose value is not what its
    annotation asks for."""
    for name, hint in get_type_hints(type(record), include_extras=True).items():
        value = getattr(record, name)
        if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
            value = value.item()  # NumPy's numbers are not JSON's
            object.__setattr__(record, name, value)
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, hint):  # type: ignore[arg-type]
                wanted = f"a {hint.__name__}: change its values with config.with_({name}__...=...)"  # type: ignore
                raise UserError(f"{prefix}{name} is {value!r}, but it must be {wanted}.")
            check_fields(value, f"{prefix}{name}.")
            continue
        needed = _needed(hint, value)
        require(needed is None, f"{prefix}{name}", value, needed or "")


def require(holds: bool, name: str, value: object, needed: str) -> None:
    """Raises a `UserError` unless the condition holds."""
    if not holds:
        raise UserError(f"{name} is {value!r}, but it must be {needed}.")


def _needed(hint: Any, value: Any) -> str | None:
    """What the value should have been; None if all is well."""
    options = get_args(hint)
    if type(None) in options:
        (inner,) = (option for option in options if option is not type(None))
        needed = None if value is None else _needed(inner, value)
        return needed and f"{needed}, or None"
    if get_origin(hint) is Annotated:
        return _needed(options[0], value) or _beyond(options[1], value)
    if get_origin(hint) is Literal:
        return None if value in options else f"one of: {', '.join(map(str, options))}"
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple) or len(value) != len(options):
            return f"{len(options)} numbers"
        return next(filter(None, map(_needed, options, value)), None)
    return _needed_type(hint, value)


def _needed_type(hint: type, value: Any) -> str | None:
    is_bool = isinstance(value, bool)
    fits = {
        bool: (is_bool, "True or False"),
        int: (isinstance(value, numbers.Integral) and not is_bool, "a whole number (int)"),
        float: (isinstance(value, numbers.Real) and not is_bool and math.isfinite(value), "a finite number"),
    }
    holds, needed = fits.get(hint, (isinstance(value, hint), f"a {hint.__name__}"))
    return None if holds else needed


def _beyond(limits: Any, value: Any) -> str | None:
    """All limits in words, if the value lies beyond one of them."""
    given = list(limits) if isinstance(limits, Interval) else [limits]
    kinds = [(*_LIMITS[type(limit)], limit) for limit in given]
    if all(holds(value, getattr(limit, field)) for field, _, holds, limit in kinds):
        return None
    return " and ".join(f"{words} {getattr(limit, field):g}" for field, words, _, limit in kinds)
