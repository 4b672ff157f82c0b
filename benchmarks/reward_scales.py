"""Pendulum with rewards times 1000 and 0.001, and with 10 added and subtracted: learning should not notice.

    python benchmarks/reward_scales.py [--seeds 5] [--steps 2000] [--out runs/reward-scales]

Trains `--preset quick` on each, one after the other, and prints test returns in the units of the plain task, with the
95% interval of the difference to it (Welch). The runs are kept: `doublehorizon plot` draws them.
"""

import argparse
import csv
import functools
from pathlib import Path

import gymnasium as gym
import numpy as np
from scipy import stats

import doublehorizon as dh

LENGTH = 200  # steps of an episode
SCALES = {"plain": (1.0, 0.0), "x1000": (1000.0, 0.0), "x0.001": (0.001, 0.0), "+10": (1.0, 10.0), "-10": (1.0, -10.0)}


def make_env(factor: float, offset: float) -> gym.Env:
    return gym.wrappers.TransformReward(gym.make("Pendulum-v1"), lambda reward: factor * float(reward) + offset)


def returns(run: Path, factor: float, offset: float) -> dict[int, np.ndarray]:
    """Test returns of the seeds by step, as the plain task would have them."""
    found: dict[int, list[float]] = {}
    with (run / "eval.csv").open() as file:
        for row in csv.DictReader(file):
            found.setdefault(int(row["step"]), []).append((float(row["reward"]) - LENGTH * offset) / factor)
    return {step: np.array(values) for step, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=40, help="the first seed")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("runs/reward-scales"))
    parser.add_argument("--only", nargs="+", default=list(SCALES), choices=list(SCALES))
    options = parser.parse_args()
    for name in options.only:
        run = options.out / name
        if not (run / "eval.csv").exists():
            env = functools.partial(make_env, *SCALES[name])
            model = dh.DHMBPO(env, seed=options.first, seeds=options.seeds, config=dh.presets.quick)
            model.learn(options.steps, out=run, progress_bar=False)
    curves = {name: returns(options.out / name, *SCALES[name]) for name in SCALES if (options.out / name).exists()}
    for name, curve in curves.items():
        print(f"{name:<7}", "  ".join(f"{step}: {x.mean():.1f} ± {x.std(ddof=1):.1f}" for step, x in curve.items()))
        last = max(curve)
        if name != "plain" and last in curves.get("plain", {}):
            interval = stats.ttest_ind(curve[last], curves["plain"][last], equal_var=False).confidence_interval()
            print(f"        difference at {last}: 95% interval [{interval.low:.1f}, {interval.high:.1f}]")


if __name__ == "__main__":
    main()
