"""How long a run takes from its start to its first step of learning: measured in processes of their own."""

import json
import os
import subprocess
import sys
import tempfile
import time

from doublehorizon.errors import RunError


def measure_starts(obs_size: int, act_size: int, num_seeds: int, platform: str | None) -> dict[str, dict[str, float]]:
    """Seconds until each point of a start is reached, the first fit step and the first policy update above all, with an
    empty compilation cache (cold) and again with the cache that this left (warm)."""
    with tempfile.TemporaryDirectory() as cache:
        return {name: _start(obs_size, act_size, num_seeds, platform, cache) for name in ("cold", "warm")}


def _start(obs_size: int, act_size: int, num_seeds: int, platform: str | None, cache: str) -> dict[str, float]:
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
    if platform is not None:
        environment["JAX_PLATFORMS"] = platform
    begun = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "doublehorizon.analysis.startup", *map(str, (obs_size, act_size, num_seeds))],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RunError(f"measuring the start failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    stamps = json.loads(done.stdout.splitlines()[-1])
    return {name: stamp - begun for name, stamp in stamps.items()}


def main() -> None:
    """Starts as a run does and prints at what time which point was reached."""
    import jax

    from doublehorizon.algorithm import agent
    from doublehorizon.algorithm.devices import find_devices, use_compilation_cache, using
    from doublehorizon.algorithm.types import Task
    from doublehorizon.analysis.speed import STEPS, prepare
    from doublehorizon.config import Config

    stamps = {"imported": time.time()}
    obs_size, act_size, num_seeds = map(int, sys.argv[1:])
    config, task = Config(), Task(obs_size, act_size, None)
    use_compilation_cache()
    devices = find_devices(None, num_seeds)
    stamps["device"] = time.time()
    with using(devices):
        bench = prepare(config, task, num_seeds, 20 * STEPS)
        jax.block_until_ready(bench.replay)
        stamps["agent"] = time.time()
        budget, replay = bench.budget(), bench.replay
        few = 4 * config.policy.refresh_every  # few steps, same program
        fit = agent.fit_model.in_background(devices, config, budget, replay, bench.state)
        improve = agent.improve_policy.in_background(devices, config, task, few, budget, replay, bench.state)
        run_fit = fit.result()
        stamps["fit_compiled"] = time.time()
        state, metrics = run_fit(config, budget, replay, bench.state)
        jax.block_until_ready(metrics)
        stamps["first_fit_step"] = time.time()
        run_improve = improve.result()
        stamps["policy_compiled"] = time.time()
        jax.block_until_ready(run_improve(config, task, few, budget, replay, state))
        stamps["first_update"] = time.time()
    print(json.dumps(stamps))


if __name__ == "__main__":
    main()
