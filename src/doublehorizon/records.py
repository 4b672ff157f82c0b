"""A config as JSON and back, and with some values changed; what is not a config is told in one line."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from doublehorizon.config import Config, require
from doublehorizon.errors import UserError


def to_json(config: Config) -> dict[str, Any]:
    """Nested plain values, as they stand in a run's `config.json`."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(values: dict[str, Any]) -> Config:
    """The inverse of `to_json`; unknown or ill-typed entries are a `UserError`."""
    return _record(Config, values, "config")


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with other values, by names such as `horizons.training`. All change at once, as they must agree."""
    groups: dict[str, Any] = {}
    for name, value in values.items():
        group, _, inner = name.partition(".")
        groups[group] = dataclasses.replace(groups.get(group, getattr(config, group)), **{inner: value})
    return dataclasses.replace(config, **groups)


def _record(kind: type, values: Any, path: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(f"{path} is {values!r}, but it must be a group of named values.")
    hints = get_type_hints(kind)
    unknown = set(values) - set(hints)
    if unknown:
        raise UserError(f"{path} has no field {sorted(unknown)[0]!r}. Its fields are: {', '.join(hints)}.")
    return kind(**{name: _value(hints[name], value, f"{path}.{name}") for name, value in values.items()})


def _value(hint: Any, value: Any, path: str, or_null: str = "") -> Any:
    if dataclasses.is_dataclass(hint):
        return _record(hint, value, path)  # type: ignore[arg-type]
    options = get_args(hint)
    if type(None) in options:
        (hint,) = (kind for kind in options if kind is not type(None))
        return None if value is None else _value(hint, value, path, " or null")
    if get_origin(hint) is tuple:
        fits = isinstance(value, list) and len(value) == len(options) and all(_is_number(v) for v in value)
        needed = f"{len(options)} numbers"
        value = tuple(float(v) for v in value) if fits else value
    elif get_origin(hint) is Literal:
        fits, needed = value in options, f"one of: {', '.join(options)}"
    elif hint is float:
        fits, needed = _is_number(value), "a number"
        value = float(value) if fits else value
    else:
        fits, needed = type(value) is hint, hint.__name__  # int or bool; a bool is no int here
    require(fits, path, value, needed + or_null)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
