"""`doublehorizon bench`."""

import dataclasses
import json
import os
import platform as machine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from doublehorizon.atomic_files import read_json
from doublehorizon.cli.options import Device, PathIfGiven
from doublehorizon.cli.parsing import parse
from doublehorizon.errors import UserError
from doublehorizon.jax_settings import prepare_jax

_EXAMPLES = """Measures the algorithm's parts on this machine: milliseconds of each, and what share of the machine's
limits (operations of a large matrix product, bytes of a large copy, measured in the same run) they reach.

examples:
  doublehorizon bench
  doublehorizon bench --seeds 1,8,16 --json > h200.json
  doublehorizon bench --baseline benchmarks/h200.json"""


@dataclass
class Bench:
    """What `doublehorizon bench` takes."""

    seeds: Annotated[str, tyro.conf.arg(metavar="N,N,...")] = "1"
    """Numbers of seeds side by side, one measurement each."""
    task_size: Literal["hopper", "halfcheetah", "humanoid"] = "halfcheetah"
    """Whose observations and actions: 11 and 3, 17 and 6, 348 and 17."""
    rows: int = 64_000
    """Transitions in each seed's replay."""
    preset: Literal["dhmbpo", "paper", "light", "quick"] = "dhmbpo"
    """Whose networks and batches."""
    device: Device = None
    """Where to measure. Default: a GPU if JAX sees one."""
    start: bool = True
    """Also measure how long a run takes to start."""
    profile: bool = False
    """Also list the kernels that joint updates and epochs spend their time in."""
    baseline: PathIfGiven = None
    """An earlier output of `bench --json` to compare with."""
    json: bool = False
    """Print the figures as JSON."""


def run(arguments: list[str]) -> int:
    """Measures, prints a table or JSON."""
    options = parse(Bench, "bench", _EXAMPLES, arguments)
    try:
        counts = sorted({int(n) for n in options.seeds.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        raise UserError(f"--seeds is {options.seeds!r}, but whole numbers above 0 are needed, such as 1,8,16.")
    if options.rows < 5000 or options.rows % 5 != 0:
        raise UserError(f"--rows is {options.rows}, but a multiple of 5, at least 5000, is needed.")
    baseline = None if options.baseline is None else _read(options.baseline)
    result = _measure(options, counts)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        _print_tables(result)
    if baseline is not None:
        _print_comparison(result, baseline)
    return 0


def _measure(options: Bench, counts: list[int]) -> dict[str, Any]:
    from doublehorizon.analysis.startup import measure_starts

    if options.device is not None:  # must be said before JAX starts
        prepare_jax(options.device)
    sizes = {"hopper": (11, 3), "halfcheetah": (17, 6), "humanoid": (348, 17)}[options.task_size]
    with Console(stderr=True, emoji=False).status("measuring the start") as status:
        starts = {}
        for count in counts if options.start else []:  # before this process takes the GPU's memory
            status.update(f"{count} seed(s): starting twice, with an empty compilation cache and a full one")
            starts[str(count)] = measure_starts(*sizes, count, os.environ.get("JAX_PLATFORMS"))

        from doublehorizon.algorithm.devices import find_devices, using
        from doublehorizon.algorithm.types import Task
        from doublehorizon.analysis import speed
        from doublehorizon.presets import preset

        devices = find_devices(None, max(counts))
        result: dict[str, Any] = _about(options, devices)
        found = {}
        for count in counts:
            devices = find_devices(None, count)
            with using(devices):
                bench = speed.prepare(preset(options.preset), Task(*sizes, None), count, options.rows)
                say = lambda what, n=count: status.update(f"{n} seed(s): {what}")  # noqa: E731
                measured = speed.measure(bench, devices, say, options.profile)
            found[count] = measured["parts"]
            result["seeds"][str(count)] = {
                "thousand_steps": measured["thousand_steps"],
                "profiles": measured.get("profiles", {}),
                "peak_gib": speed.peak_gib(devices),
                "start_seconds": starts.get(str(count)),
            }
        with using(find_devices(None, 1)):  # last: its large arrays must not count as the algorithm's peak memory
            status.update("the machine's limits")
            result["limits"] = speed.limits()
    for count, parts in found.items():
        shares = {name: _shares(part, count, result["limits"]) for name, part in parts.items()}
        result["seeds"][str(count)]["parts"] = shares
    return result


def _about(options: Bench, devices: list[Any]) -> dict[str, Any]:
    import equinox
    import jax

    from doublehorizon import __version__

    versions = {"doublehorizon": __version__, "jax": jax.__version__, "equinox": equinox.__version__}
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "cores": os.cpu_count(),
        "python": machine.python_version(),
        "versions": versions,
        "preset": options.preset,
        "task_size": options.task_size,
        "rows": options.rows,
        "seeds": {},
    }


def _shares(part: Any, num_seeds: int, limits: dict[str, float]) -> dict[str, float]:
    """A part's figures for all seeds together. Products of a fit are in 16 bits where the machine has them."""
    fields = dataclasses.asdict(part)
    per_second = 1e3 * num_seeds / part.milliseconds
    half = limits.get("float16_flops", limits["float32_flops"])
    best = half if part.kind == "fit" else limits["float32_flops"]
    return fields | {
        "share_of_flops": part.flops * per_second / best,
        "share_of_bytes": part.bytes * per_second / limits["bytes"],
    }


def _print_tables(result: dict[str, Any]) -> None:
    console, limits = Console(), result["limits"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    console.print(f"{result['devices']} x {result['device']}, {result['cores']} cores, {versions}", highlight=False)
    rates = [
        f"{name.removesuffix('_flops')} {value / 1e12:.3g} TFLOP/s" for name, value in limits.items() if "_" in name
    ]
    console.print(f"limits: {', '.join(rates)}, copy {limits['bytes'] / 1e9:.0f} GB/s", highlight=False)
    table = Table("seeds", "part", "ms", "of FLOP/s", "of bytes/s")
    for count, found in result["seeds"].items():
        for name, part in found["parts"].items():
            shares = (f"{part[f'share_of_{what}']:.0%}" if part[what] else "" for what in ("flops", "bytes"))
            table.add_row(count, name.replace("_", " "), f"{part['milliseconds']:.3f}", *shares)
        whole = found["thousand_steps"]
        how = "" if whole["measured"] else ", from the parts"
        each = f"{whole['iterations']} fits of {whole['epochs']} epochs"
        table.add_row(count, f"1000 steps ({each}{how})", f"{whole['milliseconds']:.0f}")
        table.add_row(count, "of these, the fits", f"{whole['fits_milliseconds']:.0f}")
        table.add_section()
    console.print(table)
    for count, found in result["seeds"].items():
        console.print(f"{count} seed(s): peak memory {found['peak_gib']:.2f} GiB", highlight=False)
        for what, found_kernels in found["profiles"].items():
            _print_profile(console, what, found_kernels)
        for name, times in (found["start_seconds"] or {}).items():
            points = ", ".join(f"{what.replace('_', ' ')} {seconds:.1f} s" for what, seconds in times.items())
            console.print(f"  {name} compilation cache: {points}", highlight=False)


def _print_profile(console: Console, what: str, found: dict[str, Any], most: int = 15) -> None:
    busy, wall, count = found["busy_milliseconds"], found["wall_milliseconds"], found["count"]
    console.print(f"{what}: {wall:.1f} ms, of which {busy:.1f} ms in {count} kernels", highlight=False)
    for kernel in found["kernels"][:most]:
        line = f"  {kernel['milliseconds']:9.2f} ms {kernel['count']:6d} x  {kernel['name'][:80]}"
        console.print(line, highlight=False, markup=False)


def _read(path: Path) -> dict[str, Any]:
    try:
        baseline = read_json(path)
        baseline["seeds"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UserError(f"{path} is not an output of `doublehorizon bench --json`: {problem}.") from problem
    return baseline


def _print_comparison(result: dict[str, Any], baseline: dict[str, Any]) -> None:
    """Each part's time as a multiple of the baseline's, on stderr where the figures are JSON."""
    console = Console(stderr=True, emoji=False)
    for name in ("device", "task_size", "preset", "rows"):
        if result[name] != baseline.get(name):
            console.print(f"note: {name} is {result[name]}, the baseline's is {baseline.get(name)}", highlight=False)
    table = Table("seeds", "part", "ms", "baseline ms", "ratio")
    for count, found in result["seeds"].items():
        before = baseline["seeds"].get(count)
        if before is None:
            continue
        pairs = {
            name: (part["milliseconds"], before["parts"][name]["milliseconds"]) for name, part in found["parts"].items()
        }
        pairs["1000 steps"] = tuple(x["thousand_steps"]["milliseconds"] for x in (found, before))
        for name, (now, then) in pairs.items():
            mark = "[red]" if now > 1.1 * then else "[green]" if now < 0.9 * then else ""
            table.add_row(count, name.replace("_", " "), f"{now:.3f}", f"{then:.3f}", f"{mark}{now / then:.2f}")
        table.add_section()
    console.print(table)
