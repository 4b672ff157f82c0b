"""A config as JSON and back, and with some values changed; what is not a config is reported in one line."""

import ast
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from doublehorizon.atomic_files import read_json
from doublehorizon.config import Config
from doublehorizon.errors import UserError


def to_json(config: Config) -> dict[str, Any]:
    """Nested plain values, as they stand in a run's `config.json`."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(values: dict[str, Any]) -> Config:
    """The inverse of `to_json`; unknown or ill-typed entries are a `UserError`."""
    return _record(Config, values, "config", Config())


_BEFORE = {
    "fit": {"batches_per_step": None, "recent_share": 0.0},
    "model": {"rollout_noise": 1.0},
    "policy": {"reward_unit": "one"},
    "loop": {"seed_episodes": 5},
    "terminator": {"rewards": False},
}
"""What settings that came later were, in effect, in runs of before; only where it is not the default of today."""


def from_run(values: dict[str, Any]) -> Config:
    """A run's config, perhaps written by an earlier version."""
    groups = {group: _BEFORE.get(group, {}) | value for group, value in values.items() if isinstance(value, dict)}
    config = from_json(values | groups)
    steps, random = config.loop.steps_per_iteration, config.loop.seed_iterations
    if "batches_per_step" in values.get("fit", {}) or steps is None or random is not None:
        return config
    return changed(config, {"loop.seed_iterations": max(5, 1000 // steps)})  # what None meant before little fits


def read_config(path: Path, base: Config | None = None) -> Config:
    """The config in a run's `config.json`, or in a file that holds nothing else; what that leaves out is as in `base`,
    or the default's."""
    try:
        values = read_json(path)
    except (OSError, ValueError) as problem:
        raise UserError(f"{path} cannot be read as a config: {problem}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no config, but {type(values).__name__}. config.json of a run is one.")
    if not isinstance(values.get("config"), dict):
        return _record(Config, values, str(path), base or Config())
    if base is not None:
        raise UserError(f"{path} holds all numbers of a run, so there is nothing left for --preset: leave it out.")
    return from_run(values["config"])


def written_value(text: str) -> Any:
    """A value of a config as it is written in JSON or Python; a word stands for itself."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"null": None, "true": True, "false": False}.get(text, text)
    return tuple(found) if isinstance(found, list) else found


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with other values, by names such as `horizons.training` or `precision`, as files write them."""
    return config.with_(**{name.replace(".", "__"): value for name, value in values.items()})


def _record(kind: type, values: Any, path: str, base: Any) -> Any:
    """`base`, a record of that kind, with other values."""
    if not isinstance(values, dict):
        raise UserError(f"{path} is {values!r}, but it must be a group of named values.")
    hints = get_type_hints(kind)
    unknown = set(values) - set(hints)
    if unknown:
        raise UserError(f"{path} has no field {sorted(unknown)[0]!r}. Its fields are: {', '.join(hints)}.")
    found = {name: _value(hints[name], v, f"{path}.{name}", getattr(base, name)) for name, v in values.items()}
    return dataclasses.replace(base, **found)


def _value(hint: Any, value: Any, path: str, base: Any) -> Any:
    """A value of JSON as the field's own type, where JSON has none of its own. `Config` itself checks the rest."""
    if dataclasses.is_dataclass(hint):
        return _record(hint, value, path, base)  # type: ignore[arg-type]
    options = [option for option in get_args(hint) if option is not type(None)] or [hint]
    if any(get_origin(option) is tuple for option in (hint, *options)) and isinstance(value, list):
        return tuple(_value(float, number, path, base) for number in value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if float in options and is_number else value
