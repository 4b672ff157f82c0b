"""Drawing: learning curves, aggregates over tasks, performance profiles."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from doublehorizon.analysis.aggregate import Interval
from doublehorizon.analysis.curves import Curves, common_steps, mean_and_interval
from doublehorizon.errors import UserError

COLORS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#65a30d", "#be185d")


def new_figure(rows: int, columns: int) -> tuple[Any, list[Any]]:
    """A figure with `rows * columns` axes, in the order of reading."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        rows, columns, figsize=(5 * columns + 1, 3.6 * rows + 0.4), layout="constrained", squeeze=False
    )
    return figure, list(axes.ravel())


def figure_of(count: int) -> tuple[Any, list[Any]]:
    """A figure with `count` axes: at most three beside each other, four as a square."""
    columns = 2 if count == 4 else min(3, count)
    figure, axes = new_figure(-(-count // columns), columns)
    for left_over in axes[count:]:
        left_over.remove()
    return figure, axes[:count]


def save_figure(figure: Any, path: Path) -> None:
    """Writes a file whose name decides the format (PNG, SVG, PDF)."""
    import matplotlib.pyplot as plt

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as problem:
        raise UserError(f"{path} cannot be written: {problem.strerror}.") from problem
    except ValueError as problem:
        raise UserError(
            f"{path} cannot be written: {problem}. Name a file that ends in .png, .svg or .pdf."
        ) from problem
    finally:
        plt.close(figure)


def plot(sets: Mapping[str, Curves], title: str, path: Path, until: int | None = None) -> None:
    """Mean and 95% interval over seeds of each set, in one figure."""
    figure, axes = new_figure(1, 1)
    draw_curves(axes[0], {label: (curves, None) for label, curves in sets.items()}, title, until)
    save_figure(figure, path)


def draw_curves(
    axes: Any,
    sets: Mapping[str, tuple[Curves, Curves | None]],
    title: str,
    until: int | None = None,
    twins: Mapping[str, str] | None = None,
) -> None:
    """Mean and 95% interval over seeds of each set; against the seconds in its second curves, if it has them. Of a
    twin the mean alone, dashed, in the color of the set that it is beside."""
    is_time, twins = False, twins or {}
    own = [label for label in sets if label not in twins]
    for label, (curves, times) in sets.items():
        steps = common_steps(curves, until)
        mean, half = mean_and_interval(curves, steps)
        is_time = times is not None
        at = np.asarray(steps) if times is None else mean_and_interval(times, steps)[0] / 60.0
        color = COLORS[own.index(twins.get(label, label)) % len(COLORS)]
        count = f" ({len(curves)} seed{'s' if len(curves) > 1 else ''})"
        if label in twins:
            axes.plot(at, mean, "--", color=color, label=label + (count if len(curves) > 1 else ""))  # or a mean itself
            continue
        axes.plot(at, mean, color=color, label=label + count)
        axes.fill_between(at, mean - half, mean + half, color=color, alpha=0.2, linewidth=0)
    axes.set(title=title, xlabel="minutes" if is_time else "simulator steps", ylabel="test return")
    axes.legend(loc="best", fontsize="x-small" if len(sets) > 3 else "small", framealpha=0.6)
    axes.grid(alpha=0.3)
    if not is_time:
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x >= 1000 else f"{x:g}")


def draw_aggregates(axes: Any, found: Mapping[str, Mapping[str, Interval]]) -> None:
    """IQM, median and mean of each method, with their intervals."""
    names = list(next(iter(found.values())))
    for k, (label, values) in enumerate(found.items()):
        for row, name in enumerate(names):
            at, value = len(names) - 1 - row + 0.12 * (len(found) - 1) / 2 - 0.12 * k, values[name]
            color = COLORS[k % len(COLORS)]
            axes.plot([value.low, value.high], [at, at], color=color, linewidth=5, alpha=0.4, solid_capstyle="butt")
            axes.plot([value.value], [at], "o", color=color, markersize=4, label=label if row == 0 else None)
    axes.set_yticks(range(len(names)), names[::-1])
    axes.set(title="over all tasks", xlabel="normalised score", ylim=(-1.0, len(names) - 0.4))
    axes.legend(fontsize="small", loc="lower center", ncols=4)  # below all intervals
    axes.grid(alpha=0.3, axis="x")


def draw_profiles(axes: Any, taus: np.ndarray, found: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
    """Share of runs above each score, with bands."""
    for k, (label, (share, low, high)) in enumerate(found.items()):
        color = COLORS[k % len(COLORS)]
        axes.plot(taus, share, color=color, label=label)
        axes.fill_between(taus, low, high, color=color, alpha=0.2, linewidth=0)
    axes.set(
        title="performance profile", xlabel="normalised score", ylabel="share of runs above it", ylim=(-0.02, 1.02)
    )
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
