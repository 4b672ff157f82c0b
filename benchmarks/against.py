"""Environment steps and seconds until a task is solved: doublehorizon beside the SAC of Stable-Baselines3 and of SBX.

    python benchmarks/against.py --others PYTHON [--tasks Pendulum-v1 Reacher-v5] [--seeds 3] [--first 20]

PYTHON is the interpreter of another environment with `pip install stable-baselines3 sbx-rl "gymnasium[mujoco,box2d]"`.
Every run is a process of its own, one after the other, and its seconds count from its start: imports, compilation and
evaluations included. A task is solved when the mean return of 10 test episodes reaches its mark; all are tested every
200 steps (1000 on the longer tasks), and stop when they are done, after 60,000 steps or after 40 minutes: then the
steps are -1. doublehorizon's compilation cache is warm: it first runs 600 steps unmeasured; SBX keeps none. The others
run with their defaults, doublehorizon with `--preset quick`, which was tuned with seeds 0 to 14 and
from 100 on.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple


class Task(NamedTuple):
    """The return at which it is solved, and the steps between two tests, a multiple of 200 (doublehorizon's
    iterations)."""

    mark: float
    every: int = 1000


TASKS = {
    "Pendulum-v1": Task(-200.0, 200),
    "InvertedPendulum-v5": Task(900.0, 200),
    "InvertedDoublePendulum-v5": Task(9000.0),
    "Reacher-v5": Task(-5.0),
    "MountainCarContinuous-v0": Task(90.0),
    "LunarLanderContinuous-v3": Task(200.0),
    "BipedalWalker-v3": Task(250.0),
}
MOST_STEPS, MOST_SECONDS = 60_000, 2400.0
WARM_UP = 600  # steps, in which all is compiled
SYSTEMS = ("doublehorizon", "sb3", "sbx")


def run_doublehorizon(name: str, seed: int, most_steps: int) -> int:
    """Steps after which the task was solved; -1 if it was not."""
    import gymnasium as gym
    import numpy as np

    import doublehorizon as dh
    from doublehorizon.config_json import changed

    task, test, solved, begun = TASKS[name], gym.make(name), [], time.monotonic()
    test.reset(seed=seed + 1000)

    def episode(policy) -> float:
        obs, total, over = test.reset()[0], 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = test.step(policy.predict(obs)[0])
            total, over = total + float(reward), terminated or truncated
        return total

    def goes_on(progress) -> bool:
        is_test = progress.policies is not None and progress.step % task.every == 0
        if is_test and np.mean([episode(progress.policies[0]) for _ in range(10)]) >= task.mark:
            solved.append(progress.step)
        return not solved and time.monotonic() - begun < MOST_SECONDS

    config = changed(dh.presets.quick, {"loop.evaluation_episodes": 0})  # all are tested in the same way
    dh.DHMBPO(name, seed=seed, config=config).learn(most_steps, callback=goes_on)
    return solved[0] if solved else -1


def run_other(system: str, name: str, seed: int, most_steps: int) -> int:
    import gymnasium as gym
    from stable_baselines3.common.evaluation import evaluate_policy

    if system == "sb3":
        from stable_baselines3 import SAC
    else:
        from sbx import SAC
    task, begun = TASKS[name], time.monotonic()
    model = SAC("MlpPolicy", name, seed=seed)
    test = gym.make(name)
    test.reset(seed=seed + 1000)
    while model.num_timesteps < most_steps and time.monotonic() - begun < MOST_SECONDS:
        model.learn(task.every, reset_num_timesteps=False)
        mean, _ = evaluate_policy(model, test, n_eval_episodes=10, warn=False)
        if mean >= task.mark:
            return model.num_timesteps
    return -1


def measure(python: str, system: str, task: str, seed: int, most_steps: int = MOST_STEPS) -> tuple[int, float]:
    begun = time.monotonic()
    one = [python, __file__, "--one", system, task, str(seed), str(most_steps)]
    done = subprocess.run(one, capture_output=True, text=True, check=False)
    took = time.monotonic() - begun
    if done.returncode != 0:
        raise SystemExit(f"{system} on {task} failed: {done.stderr[-2000:]}")
    return int(done.stdout.split()[-1]), took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--others", help="interpreter with stable-baselines3 and sbx-rl")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first", type=int, default=20, help="the first of them")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--one", nargs=4, metavar=("SYSTEM", "TASK", "SEED", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        system, task, seed, steps = options.one
        solve = run_doublehorizon if system == "doublehorizon" else lambda *a: run_other(system, *a)
        print(solve(task, int(seed), int(steps)))
        return
    results, seeds = [], range(options.first, options.first + options.seeds)
    for task in options.tasks:
        for system in options.systems:
            python = sys.executable if system == "doublehorizon" else options.others
            if python is None:
                parser.error("--others is needed for sb3 and sbx")
            if system == "doublehorizon":
                measure(python, system, task, 100, WARM_UP)
            found = [measure(python, system, task, seed) for seed in seeds]
            steps, seconds = ([one[k] for one in found] for k in (0, 1))
            results.append({"task": task, "system": system, "seeds": [*seeds], "steps": steps, "seconds": seconds})
            print(
                f"{task:<20} {system:<14} steps {statistics.median(steps):6.0f} {steps}  "
                f"seconds {statistics.median(seconds):6.1f} {[round(s, 1) for s in seconds]}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
