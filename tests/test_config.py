"""Every field of the config has its range where it is declared, and a value beyond it gets one line."""

import dataclasses
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from annotated_types import Ge, Gt, Interval

import doublehorizon as dh
from doublehorizon import presets
from doublehorizon.config import Config
from doublehorizon.config_json import changed, from_run, to_json
from doublehorizon.schedule import seed_iterations

ANY_NUMBER = {"policy.target_entropy_per_action"}


def fields(kind: type = Config, prefix: str = "") -> dict[str, object]:
    """Annotations by name, such as `policy.learning_rate`."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        inner = fields(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else {f"{prefix}{name}": hint}
        found |= inner
    return found


def assert_refused(name: str, value: object) -> str:
    with pytest.raises(dh.UserError) as problem:
        changed(Config(), {name: value})
    message = str(problem.value)
    assert message.startswith(f"{name} is {value!r}, but it must be ") and "\n" not in message
    return message


def beyond(hint: object) -> list[object]:
    """Values that are not what the annotation asks for."""
    parts = [part for part in get_args(hint) if part is not type(None)]
    if type(None) in get_args(hint):
        return beyond(parts[0])
    if get_origin(hint) is tuple:
        good = [0.001] * len(parts)
        return [(), *((*good[:-1], bad) for bad in beyond(parts[0]))]
    if get_origin(hint) is Literal:
        return ["foo", 3]
    if hint is bool:
        return [1, "yes"]
    if get_origin(hint) is not Annotated:
        return ["a", None, float("nan")]
    base, limits = parts
    given = list(limits) if isinstance(limits, Interval) else [limits]
    steps = [x.gt if isinstance(x, Gt) else x.ge - 1 if isinstance(x, Ge) else 7 for x in given]
    return [*steps, "a", None, float("nan"), *([1.5] if base is int else [])]


@pytest.mark.parametrize("name", fields())
def test_a_value_beyond_its_range_gets_one_line(name):
    hint = fields()[name]
    for value in beyond(hint):
        if value is None and type(None) in get_args(hint):
            continue
        assert_refused(name, value)


def test_every_number_has_a_range():
    without = {name for name, hint in fields().items() if hint in (int, float)}
    assert without == ANY_NUMBER


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("policy.learning_rate", -1, "more than 0."),
        ("critic.target_rate", 7, "more than 0 and at most 1."),
        ("loop.replay_capacity", -5, "at least 1."),
        ("critic.bounds", "foo", "one of: all, alive, alive_and_zero, endings."),
        ("policy.initial_temperature", 0, "more than 0."),
        ("model.dropout", (0.1, 0.2, 1.0), "at least 0 and below 1."),
        ("loop.time_limit", 0, "at least 1, or None."),
        ("model.norm_eps", (1.0,), "3 numbers, or None."),
        ("policy.discount", 1.0, "more than 0 and below 1, or None."),
        ("fit.batch_size", 2.5, "a whole number (int)."),
        ("precision", "float16", "one of: tensorfloat32, float32."),
    ],
)
def test_what_is_needed_is_said(name, value, needed):
    assert assert_refused(name, value).endswith(needed)


def test_numbers_of_numpy_and_whole_floats_are_welcome():
    config = changed(
        Config(), {"policy.updates_per_step": 2, "fit.batch_size": np.int64(64), "policy.discount": np.float64(0.9)}
    )
    assert config.fit.batch_size == 64
    with pytest.raises(dh.UserError, match="policy is 3, but it must be a PolicyConfig"):
        Config(policy=3)  # type: ignore[arg-type]


def test_a_run_of_before_has_as_many_random_iterations_as_it_had():
    def without(group: dict, name: str) -> dict:
        return {other: value for other, value in group.items() if other != name}

    now = to_json(Config())
    assert seed_iterations(from_run(now), 1000) == 10
    little = now | {"loop": without(now["loop"], "seed_episodes")}  # of when little fits were new
    assert seed_iterations(from_run(little), 1000) == 25
    before = little | {"fit": without(now["fit"], "batches_per_step")}
    assert seed_iterations(from_run(before), 1000) == 5
    assert seed_iterations(from_run(before | {"loop": little["loop"] | {"seed_iterations": 3}}), 1000) == 3


def test_a_run_of_before_is_fitted_as_it_was():
    values = to_json(presets.paper)
    for name in ("batches_per_step", "recent_share"):
        del values["fit"][name]
    del values["loop"]["seed_episodes"]
    assert from_run(values) == presets.paper


def test_some_values_are_changed_in_one_line():
    config = presets.quick.with_(policy__width=64, horizons__training=3, precision="float32")
    assert (config.policy.width, config.horizons.training, config.precision) == (64, 3, "float32")
    assert config.policy.batch_size == presets.quick.policy.batch_size and config.critic == presets.quick.critic
    assert config == changed(presets.quick, {"policy.width": 64, "horizons.training": 3, "precision": "float32"})
    for name, words in (("polcy__width", "no setting 'polcy'"), ("policy__widht", "Did you mean 'width'")):
        with pytest.raises(dh.UserError, match=words):
            presets.quick.with_(**{name: 3})
