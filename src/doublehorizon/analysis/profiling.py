"""Where a program's time goes, kernel by kernel, from JAX's own trace."""

import gzip
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def profile(call: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds on the clock and in kernels (of all GPU streams, or of XLA's threads on a CPU), the number of
    kernels, and time and number of each, longest first."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            begun = time.perf_counter()
            jax.block_until_ready(call())
            wall = time.perf_counter() - begun
        files = [json.loads(gzip.decompress(path.read_bytes())) for path in Path(folder).rglob("*.trace.json.gz")]
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for file in files:
        for event in _kernels(file["traceEvents"]):
            total[event["name"]] += event["dur"] / 1e3
            count[event["name"]] += 1
    return {
        "wall_milliseconds": 1e3 * wall,
        "busy_milliseconds": sum(total.values()),
        "count": sum(count.values()),
        "kernels": [{"name": n, "milliseconds": ms, "count": count[n]} for n, ms in total.most_common()],
    }


def _kernels(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = {
        (e["pid"], e.get("tid")): e["args"]["name"] for e in events if e.get("name") == "thread_name" and "args" in e
    }
    streams = {key for key, name in names.items() if "Stream" in name}
    lanes = streams or {key for key, name in names.items() if name.startswith("tf_XLAEigen")}
    found = [e for e in events if e.get("ph") == "X" and (e["pid"], e.get("tid")) in lanes]
    return [e for e in found if "::" not in e["name"] and not e["name"].startswith("end: ")]  # no wrappers
