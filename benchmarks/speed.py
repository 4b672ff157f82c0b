"""Milliseconds of the algorithm's parts on this machine's device, at HalfCheetah's sizes.

python benchmarks/speed.py --seeds 1 8
"""

import argparse
import glob
import gzip
import json
import tempfile
import time
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from doublehorizon import agent
from doublehorizon import replay as replays
from doublehorizon.config import Config
from doublehorizon.types import Effort, Task, Transition

OBS, ACT, ROWS, STEPS = 17, 6, 64_000, 1000


def make(config: Config, task: Task, num_seeds: int):
    """An untrained agent and a replay of random rows."""
    seeds = jnp.arange(num_seeds)
    state = eqx.filter_jit(jax.vmap(lambda seed: agent.initial_state(config, task, seed)))(seeds)
    sizes = (OBS, ACT, config.model.members, config.fit.held_out_every)
    replay = jax.vmap(lambda _: replays.empty(ROWS, *sizes))(seeds)
    rng = np.random.default_rng(0)
    obs, act = (rng.normal(size=(num_seeds, ROWS, n)).astype(np.float32) for n in (OBS, ACT))
    rows = Transition(obs, np.tanh(act), obs[..., 0], obs + 0.1 * np.sin(obs), np.zeros((num_seeds, ROWS), np.float32))
    return agent.store(replay, state, jax.tree.map(jnp.asarray, rows))


def seconds(call) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begun


def per_unit(run, few: int, many: int, repeats: int) -> float:
    """Milliseconds per unit of work, from the difference of a long and a short call: fixed costs cancel."""
    differences = [seconds(lambda: run(many)) - seconds(lambda: run(few)) for _ in range(repeats)]
    return 1e3 * float(np.median(differences)) / (many - few)


def measure(config: Config, num_seeds: int, profile: bool) -> dict[str, float]:
    task = Task(OBS, ACT, None)
    replay, state = make(config, task, num_seeds)
    box = [state]

    def effort(epochs: int, rounds: int, rows: int = ROWS) -> Effort:
        batches = min(config.fit.batches_per_epoch, rows * 4 // 5 // config.fit.batch_size)
        return Effort(*(jnp.asarray(n, jnp.int32) for n in (rows, max(1, batches), 10**6, epochs, rounds)))

    def fit(epochs: int):
        box[0], metrics = agent.fit_model((config, effort(epochs, 1), replay), box[0])
        return metrics

    def improve(rounds: int):
        box[0], metrics = agent.improve_policy((config, task, STEPS, effort(1, rounds), replay), box[0])
        return metrics

    every = config.policy.refresh_every
    result = {
        "compile_fit_seconds": seconds(lambda: fit(1)),
        "compile_improve_seconds": seconds(lambda: improve(1)),
        "fit_epoch_ms": per_unit(fit, 5, 45, 5),
        "joint_update_with_dr_share_ms": per_unit(improve, 2, 22, 5) / every,
        "critic_phase_ms": 1e3 * float(np.median([seconds(lambda: improve(0)) for _ in range(5)])),
    }
    if profile:
        show_profile("fit, 10 epochs", lambda: fit(10))
        show_profile("improve, 5 rounds", lambda: improve(5))
    stats = jax.devices()[0].memory_stats() or {}
    return result | {"peak_gib": stats.get("peak_bytes_in_use", 0) / 2**30}


def show_profile(title: str, call, most: int = 14) -> None:
    """The kernels that took longest, from JAX's own trace."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            took = seconds(call)
        total: Counter[str] = Counter()
        count: Counter[str] = Counter()
        for path in glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True):
            with gzip.open(path) as file:
                events = json.load(file)["traceEvents"]
            lanes = {
                (e["pid"], e.get("tid"))
                for e in events
                if e.get("name") == "thread_name" and "Stream" in e["args"]["name"]
            }
            for event in events:
                if event.get("ph") == "X" and (event["pid"], event.get("tid")) in lanes:
                    total[event["name"]] += event["dur"]
                    count[event["name"]] += 1
    busy = sum(total.values())
    print(f"{title}: {1e3 * took:.1f} ms wall, {busy / 1e3:.1f} ms in {sum(count.values())} kernels")
    for name, microseconds in total.most_common(most):
        print(f"  {microseconds / 1e3:8.2f} ms {count[name]:6d} x  {name[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--precision", default=Config().precision)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    print(jax.__version__, jax.devices()[0].device_kind)
    for num_seeds in options.seeds:
        result = measure(Config(precision=options.precision), num_seeds, options.profile)
        print(
            num_seeds,
            "seeds:",
            json.dumps({name: round(value, 3) for name, value in result.items()}),
            flush=True,
        )


if __name__ == "__main__":
    main()
