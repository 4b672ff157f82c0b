"""What follows from a config and the environment: how many steps an iteration has, how long a fit may last, how far a
value looks ahead."""

import math
from typing import Any

from doublehorizon.config import Config, steps_multiple

Number = Any
"""A float or, inside a program that takes it as an argument, what stands for one there."""

_FEWEST_COUNTED, _MOST_COUNTED = 20.0, 200.0  # steps that a value counts: discounts of 0.95 and, as the paper's, 0.995


def steps_per_iteration(config: Config, time_limit: int) -> int:
    """L, the agent steps between two fits."""
    return config.loop.steps_per_iteration or _episode_steps(config, time_limit)


def steps_per_turn(config: Config, time_limit: int) -> int:
    """Agent steps between two looks at what was collected."""
    return config.loop.steps_per_turn or steps_per_iteration(config, time_limit)


def seed_iterations(config: Config, time_limit: int, has_data: bool = False) -> int:
    """Iterations of random actions before the first fit; none where there are transitions to learn from."""
    if has_data:
        return 0
    if config.loop.seed_iterations is not None:
        return config.loop.seed_iterations
    return _iterations_of(config, time_limit, config.loop.seed_episodes)


def evaluate_every(config: Config, time_limit: int) -> int:
    """Iterations between two evaluations: by default so many that tests have twice the steps of training, ten episodes
    for every five."""
    return config.loop.evaluate_every or _iterations_of(config, time_limit, 5)


def evaluated_iterations(config: Config, time_limit: int, first_fit: int, last: int) -> list[int]:
    """Iterations after which there is an evaluation: 0, the first fit, each multiple of `evaluate_every`, the last."""
    every = evaluate_every(config, time_limit)
    return sorted({0, min(first_fit, last), last, *range(every * -(-first_fit // every), last, every)})


def random_steps(config: Config, time_limit: int, has_data: bool) -> int:
    """Agent steps with random actions before the first fit."""
    return seed_iterations(config, time_limit, has_data) * steps_per_iteration(config, time_limit)


def first_effort(config: Config, iterations: float) -> float:
    """Factor on the work of the first iteration that learns, if it comes after this many iterations of steps."""
    return config.fit.first_effort or float(max(1, iterations))


def discount(config: Config, episode_steps: int | None) -> Number:
    """How much a reward one step later is worth. What comes after an episode is cut off is never earned: a value that
    looks further than that may find it cheaper to end an episode than to get better at it."""
    if config.policy.discount is not None:
        return config.policy.discount
    counted = _MOST_COUNTED if episode_steps is None else 0.4 * episode_steps
    return 1.0 - 1.0 / min(max(counted, _FEWEST_COUNTED), _MOST_COUNTED)


def rollout_noise(config: Config, can_end: bool) -> Number:
    """Factor on the noise of imagined states."""
    noise = config.model.rollout_noise
    return float(can_end) if noise is None else noise


def target_members(config: Config, can_end: bool) -> int:
    """Critics whose minimum is the target. Doubt protects from falls that the model does not know of; where nothing can
    end, it only slows learning."""
    return config.critic.target_members or min(2 if can_end else 1, config.critic.members)


def patience(config: Config, obs_size: int, factor: float = 1.0) -> int:
    """Epochs without improvement after which a fit stops, `factor` times as many as usual."""
    return int(factor * config.fit.base_epochs * math.log(obs_size + 1))


def max_epochs(config: Config, obs_size: int, factor: float = 1.0) -> int:
    """Epochs after which a fit stops in any case."""
    return int(factor * config.fit.max_epochs_factor * config.fit.base_epochs * math.log(obs_size + 1))


def _iterations_of(config: Config, time_limit: int, episodes: int) -> int:
    """In how many iterations as many steps are made as so many episodes have."""
    return math.ceil(episodes * _episode_steps(config, time_limit) / steps_per_iteration(config, time_limit))


def _episode_steps(config: Config, time_limit: int) -> int:
    """Steps of an episode, within 200..1000, and rounded."""
    multiple = steps_multiple(config)
    return max(1, round(min(max(time_limit, 200), 1000) / multiple)) * multiple
