"""What compiled programs depend on: some numbers of a config are their arguments, and what the host does with it does
not concern them. Nothing is compiled again for another learning rate, discount or evaluation period."""

import copy
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from doublehorizon.config import Config

NUMBERS = (
    "policy.learning_rate",
    "policy.discount",
    "policy.target_entropy_per_action",
    "fit.learning_rate",
    "critic.target_rate",
    "critic.bounds_rate",
    "model.rollout_noise",
    "model.reward_noise",
    "terminator.learning_rate",
    "terminator.sparsity",
)
"""Those that only enter the arithmetic, and not the shape of what is computed."""


_DEFAULT = Config()


class SplitConfig(eqx.Module):
    """A config as a program's argument: its numbers, which are traced, and the rest, which is static."""

    rest: Config = eqx.field(static=True)
    numbers: dict[str, Float[Array, ""]]

    def whole(self) -> Config:
        """The config again; inside a program its numbers are tracers, which no check of the config is asked about."""
        return _with_numbers(self.rest, self.numbers)


def split_config(config: Config) -> SplitConfig:
    """Numbers that are None, because a rule says what they are, stay in the rest."""
    found = {name: _get(config, name) for name in NUMBERS}
    numbers = {name: value for name, value in found.items() if value is not None}
    arrays = {name: jnp.asarray(value, jnp.float32) for name, value in numbers.items()}
    rest = _with_numbers(config, dict.fromkeys(numbers, ...))
    for name in ("loop", "termination", "deterministic"):
        object.__setattr__(rest, name, getattr(_DEFAULT, name))
    return SplitConfig(rest, arrays)


def _get(config: Config, name: str) -> Any:
    group, field = name.split(".")
    return getattr(getattr(config, group), field)


def _with_numbers(config: Config, values: dict[str, Any]) -> Config:
    """A copy with other values, unchecked."""
    config = copy.copy(config)
    for group in {name.split(".")[0] for name in values}:
        object.__setattr__(config, group, copy.copy(getattr(config, group)))
    for name, value in values.items():
        group, field = name.split(".")
        object.__setattr__(getattr(config, group), field, value)
    return config
