"""Scores over several tasks, as rliable (Agarwal et al., 2021) defines them: interquartile mean, median, mean and
performance profiles, with stratified bootstrap intervals: runs are drawn anew within each task."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

Scores = dict[str, np.ndarray]
"""Normalised scores of the runs of each task, on the last axis."""

_DRAWS = 2000


@dataclass(frozen=True)
class Interval:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float


def iqm(scores: Scores) -> np.ndarray:
    """Mean of the middle half of all runs of all tasks."""
    return np.asarray(stats.trim_mean(np.concatenate(list(scores.values()), axis=-1), 0.25, axis=-1))


def median(scores: Scores) -> np.ndarray:
    """Median over tasks of the mean over runs."""
    return np.asarray(np.median([np.mean(runs, axis=-1) for runs in scores.values()], axis=0))


def mean(scores: Scores) -> np.ndarray:
    """Mean over tasks of the mean over runs."""
    return np.asarray(np.mean([np.mean(runs, axis=-1) for runs in scores.values()], axis=0))


STATISTICS: dict[str, Callable[[Scores], np.ndarray]] = {"IQM": iqm, "median": median, "mean": mean}


def aggregate(scores: Scores, seed: int = 0) -> dict[str, Interval]:
    """Each statistic with its interval."""
    drawn = resampled(scores, _DRAWS, seed)
    found = {}
    for name, statistic in STATISTICS.items():
        low, high = np.percentile(statistic(drawn), [2.5, 97.5])
        found[name] = Interval(float(statistic(scores)), float(low), float(high))
    return found


def profile(scores: Scores, taus: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Share of runs above each score, mean over tasks, with its interval."""

    def shares(scores: Scores) -> np.ndarray:
        return np.mean([np.mean(runs[..., None] > taus, axis=-2) for runs in scores.values()], axis=0)

    low, high = np.percentile(shares(resampled(scores, _DRAWS, seed)), [2.5, 97.5], axis=0)
    return shares(scores), low, high


def resampled(scores: Scores, draws: int, seed: int) -> Scores:
    """As many runs of each task, drawn with replacement `draws` times: `[draw, run]`."""
    rng = np.random.default_rng(seed)
    return {task: runs[rng.integers(len(runs), size=(draws, len(runs)))] for task, runs in scores.items()}
