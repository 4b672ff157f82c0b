"""Scores over several tasks, as rliable (Agarwal et al., 2021) defines them: interquartile mean, median, mean and
performance profiles, with stratified bootstrap intervals: runs are drawn anew within each task."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

Scores = dict[str, np.ndarray]
"""Normalised scores of the runs of each task."""

_DRAWS = 2000


@dataclass(frozen=True)
class Interval:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float


def iqm(scores: Scores) -> float:
    """Mean of the middle half of all runs of all tasks."""
    return float(stats.trim_mean(np.concatenate(list(scores.values())), 0.25))


def median(scores: Scores) -> float:
    """Median over tasks of the mean over runs."""
    return float(np.median([np.mean(runs) for runs in scores.values()]))


def mean(scores: Scores) -> float:
    """Mean over tasks of the mean over runs."""
    return float(np.mean([np.mean(runs) for runs in scores.values()]))


STATISTICS: dict[str, Callable[[Scores], float]] = {"IQM": iqm, "median": median, "mean": mean}


def aggregate(scores: Scores, seed: int = 0) -> dict[str, Interval]:
    """Each statistic with its interval."""
    drawn = [resampled(scores, rng) for rng in np.random.default_rng(seed).spawn(_DRAWS)]
    found = {}
    for name, statistic in STATISTICS.items():
        low, high = np.percentile([statistic(draw) for draw in drawn], [2.5, 97.5])
        found[name] = Interval(statistic(scores), float(low), float(high))
    return found


def profile(scores: Scores, taus: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Share of runs above each score, mean over tasks, with its interval."""

    def shares(scores: Scores) -> np.ndarray:
        return np.mean([np.mean(runs[:, None] > taus[None], axis=0) for runs in scores.values()], axis=0)

    drawn = [shares(resampled(scores, rng)) for rng in np.random.default_rng(seed).spawn(_DRAWS // 4)]
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return shares(scores), low, high


def resampled(scores: Scores, rng: np.random.Generator) -> Scores:
    """As many runs of each task, drawn with replacement."""
    return {task: rng.choice(runs, len(runs)) for task, runs in scores.items()}
