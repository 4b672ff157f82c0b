"""Which horizon to take, from what `gradients` measured in one seed or several.

Seeds differ by orders of magnitude, and one wild state may rule the noise of a seed. So seeds are joined by ratios:
how many times as large the squared error of a training step is as with another horizon, geometric mean over seeds.
"""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from doublehorizon.analysis.aggregate import Interval
from doublehorizon.analysis.gradients import TINY, Tradeoff


@dataclass(frozen=True)
class Verdict:
    """All seeds together."""

    horizons: tuple[int, ...]
    ratio: np.ndarray
    """Squared error of a training step as a multiple of the least one; geometric mean over seeds."""
    factor: np.ndarray
    """Its interval goes from `ratio / factor` to `ratio * factor`."""

    @property
    def low(self) -> np.ndarray:
        """Where intervals begin."""
        return self.ratio / self.factor

    @property
    def high(self) -> np.ndarray:
        """Where they end."""
        return self.ratio * self.factor

    @property
    def best(self) -> int:
        """The horizon with the least error."""
        return self.horizons[int(np.argmin(self.ratio))]

    @property
    def candidates(self) -> list[int]:
        """Horizons that cannot be distinguished from the best one."""
        return [t for t, low in zip(self.horizons, self.low, strict=True) if low <= 1.0]


@dataclass(frozen=True)
class Advice:
    """A horizon, and why."""

    horizon: int
    reason: str
    verdict: Verdict


def judge(found: list[Tradeoff]) -> Verdict:
    """From three seeds on, how they differ gives a ratio its 95% interval. Of one or two it is two standard errors by
    how groups of states differ, leaving out one at a time, and wide enough for what both seeds say."""
    logs = np.log([one.error for one in found])
    best = int(np.argmin(logs.mean(0)))
    excess = logs - logs[:, best : best + 1]
    if len(found) > 2:
        unsure = stats.t.ppf(0.975, len(found) - 1) * stats.sem(excess, axis=0)
    else:
        over_states = 2.0 * np.sqrt(sum(_variance(one, best) for one in found)) / len(found)
        unsure = np.maximum(over_states, np.ptp(excess, axis=0) / 2)
    return Verdict(found[0].horizons, np.exp(excess.mean(0)), np.exp(unsure))


def growth(found: list[Tradeoff]) -> Interval:
    """Factor by which the standard error over states grows with each further step: mean slope of its logarithm over
    seeds, with its 95% interval. Of one seed there is none."""
    slopes = np.array([np.polyfit(one.horizons, np.log(np.maximum(one.standard_error, TINY)), 1)[0] for one in found])
    half = stats.t.ppf(0.975, len(slopes) - 1) * stats.sem(slopes) if len(slopes) > 1 else np.nan
    return Interval(*(float(np.exp(slopes.mean() + side)) for side in (0.0, -half, half)))


def _variance(one: Tradeoff, best: int) -> np.ndarray:
    """Of the logarithms of the ratios, by the jackknife."""
    excess = np.log(one.without) - np.log(one.without[:, best : best + 1])
    return (len(excess) - 1) * np.var(excess, axis=0)


def advise(found: list[Tradeoff], current: int) -> Advice:
    """A horizon is worth a change only where it is surely better than the current one."""
    verdict = judge(found)
    horizon, possible, longest = verdict.best, verdict.candidates, verdict.horizons[-1]
    if len(possible) == 1:
        steps = f"{horizon} step{'s' if horizon > 1 else ''}"
        choice = f"Keep {steps}" if horizon == current else f"Take {steps} (now {current})"
        why = f"{choice}: {_reason(found, verdict)}"
    else:
        names = f"{', '.join(map(str, possible[:-1]))} and {possible[-1]}"
        horizon = current if current in possible else horizon
        unfit = "is worse" if current in verdict.horizons else "was not compared"
        choice = f"{current} is among them: keep it" if horizon == current else f"{current} {unfit}: take {horizon}"
        more = "seeds" if len(found) > 2 else "seeds, or --states,"
        why = f"These data cannot tell {names} steps apart; {choice}. More {more} would tell more."
    few = " Seeds differ: from three on, that counts too." if len(found) < 3 else ""
    caution = (
        f"What {longest} steps say counts as the truth here, with the model's own errors in it: whether the model is "
        "good enough for so many steps, `doublehorizon analyze model` tells."
    )
    return Advice(horizon, f"{why}{few} {caution}", verdict)


def _reason(found: list[Tradeoff], verdict: Verdict) -> str:
    """How much worse the next shorter and longer ones are, and by what."""
    at = verdict.horizons.index(verdict.best)
    beside = [i for i in (at - 1, at + 1) if 0 <= i < len(verdict.horizons)]
    worse = [
        f"{verdict.ratio[i]:.{2 if verdict.ratio[i] < 10 else 0}f} times as large with {verdict.horizons[i]} "
        f"(by {_cause(found, i, at)})"
        for i in beside
    ]
    longest = " More may be better still." if at == len(verdict.horizons) - 1 else ""
    return f"the squared error of a training step is least with them, {' and '.join(worse)}.{longest}"


def _cause(found: list[Tradeoff], other: int, best: int) -> str:
    """What most of the other horizon's excess is made of, in most seeds."""

    def by_bias(one: Tradeoff) -> bool:
        bias = max(one.distance[other], 0.0) - max(one.distance[best], 0.0)
        return bool(bias > one.error[other] - one.error[best] - bias)

    return "bias" if sum(map(by_bias, found)) > len(found) / 2 else "noise"
