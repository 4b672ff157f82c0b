"""Optax with the types of our records: a step takes parameters and returns parameters of the same kind."""

from typing import Any, TypeVar

import optax

Parameters = TypeVar("Parameters")


def start(optimizer: optax.GradientTransformation, parameters: Any) -> optax.OptState:
    """The optimiser's memory before the first step."""
    return optimizer.init(parameters)


def step(
    optimizer: optax.GradientTransformation, parameters: Parameters, gradient: Any, memory: optax.OptState
) -> tuple[Parameters, optax.OptState]:
    """Parameters and memory after one step against the gradient."""
    given: Any = parameters
    update, memory = optimizer.update(gradient, memory, given)
    moved: Any = optax.apply_updates(given, update)
    return moved, memory


def follow(leader: Parameters, follower: Parameters, rate: float) -> Parameters:
    """The follower, moved a share `rate` of the way to the leader."""
    new: Any = leader
    old: Any = follower
    moved: Any = optax.incremental_update(new, old, rate)
    return moved
