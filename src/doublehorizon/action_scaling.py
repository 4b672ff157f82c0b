"""Actions between the policy's range, [-1, 1], and the environment's own. Operators only: for NumPy and JAX alike."""

from typing import Any

MIN_ACTION_STD = 1e-5
"""The least standard deviation of a policy before squashing."""


def to_own_units(unit: Any, low: Any, high: Any) -> Any:
    """From [-1, 1] to [low, high]."""
    return low + (unit + 1.0) * 0.5 * (high - low)


def to_unit(action: Any, low: Any, high: Any) -> Any:
    """From [low, high] to [-1, 1]."""
    return 2.0 * (action - low) / (high - low) - 1.0
