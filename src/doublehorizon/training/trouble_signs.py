"""Signs that a run does not learn as it should: each is told once, while it runs, with what to try."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from doublehorizon.training.learning_phase import SeedMetrics

_FEW_UPDATES = 3000  # in which anything may happen
_POOR_MODEL = 0.95  # root mean squared error, in units of the targets' spread: 1 is that of their mean
_NARROW = 0.01  # spread of the critics' targets, as a share of the range between the bounds of Q
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-5, 10.0  # in units of the reward
_STUCK_TESTS = 6  # after the first fit, none of which is better than random actions
_FAR_BEHIND = 5.0  # times the spread of the other seeds


class TroubleSigns:
    """What has been told already; a run has one."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def new(
        self, seeds: Sequence[int], updates: int, metrics: SeedMetrics, returns: Mapping[int, Mapping[int, float]]
    ) -> list[str]:
        """Lines about what was not told before, from the figures of the last iteration, per seed, after that many
        updates, and from all test returns by step and seed."""
        signs = [*_in_figures(seeds, updates, metrics), *_in_returns(seeds, returns)]
        lines = [line for kind, line in signs if kind not in self._told]
        self._told |= {kind for kind, _ in signs}
        return lines


def _in_figures(seeds: Sequence[int], updates: int, metrics: SeedMetrics) -> Iterator[tuple[str, str]]:
    if updates < _FEW_UPDATES:
        return
    error = metrics.get("model/validation_rmse", np.zeros(len(seeds)))
    if (poor := error >= _POOR_MODEL).any():
        yield (
            "model",
            f"the model predicts hardly better than the mean ({_named(seeds, poor)}: error {error.max():.2f} of the "
            "spread). Try --model.noise state, longer fits (--fit.batches-per-step 3), or more random steps "
            "(--loop.seed-iterations)",
        )
    width, spread = metrics["train/q_high"] - metrics["train/q_low"], metrics["train/q_target_std"]
    if (narrow := spread < _NARROW * width).any():
        yield (
            "bounds",
            f"the bounds of Q are {width[narrow].max():.3g} apart, but what the critics learn differs by "
            f"{spread[narrow].min():.3g} only ({_named(seeds, narrow)}): rare rewards set the bounds. Try "
            "--critic.quantile 0.1",
        )
    temperature = metrics["train/ent_coef"]
    if (low := temperature < _LEAST_TEMPERATURE).any():
        yield (
            "cold",
            f"the temperature is {temperature.min():.1g} ({_named(seeds, low)}): the policy hardly explores. Try a "
            "higher --policy.target-entropy-per-action",
        )
    if (high := temperature > _MOST_TEMPERATURE).any():
        yield (
            "hot",
            f"the temperature is {temperature.max():.3g} ({_named(seeds, high)}): entropy outweighs the reward. Try a "
            "lower --policy.target-entropy-per-action",
        )


def _in_returns(seeds: Sequence[int], returns: Mapping[int, Mapping[int, float]]) -> Iterator[tuple[str, str]]:
    """The first test is of random actions, or of a policy that was given."""
    steps = sorted(returns)
    table = np.array([[returns[step][seed] for seed in seeds] for step in steps])  # [test, seed]
    if len(steps) > _STUCK_TESTS and (table[1:].max(axis=0) <= table[0]).all():
        yield (
            "stuck",
            f"after {len(steps) - 1} tests no policy was better than the first actions (return {table[0].mean():.4g}). "
            "See 'When it does not learn' in the docs",
        )
    if len(steps) <= _STUCK_TESTS // 2 or len(seeds) < 4:
        return
    for k, seed in enumerate(seeds):
        others, own = np.delete(table[-2:].mean(axis=0), k), table[-2:, k].mean()
        if own < np.median(others) - _FAR_BEHIND * max(np.ptp(others), 1e-9 * abs(np.median(others))):
            yield (
                f"behind {seed}",
                f"seed {seed} is far behind the others (return {own:.4g}, they have {others.min():.4g} to "
                f"{others.max():.4g}). Judge by more seeds, and take the policy of another one",
            )


def _named(seeds: Sequence[int], which: np.ndarray) -> str:
    chosen = [str(seed) for seed, is_one in zip(seeds, which, strict=True) if is_one]
    return f"seed{'s' if len(chosen) > 1 else ''} {', '.join(chosen)}"
