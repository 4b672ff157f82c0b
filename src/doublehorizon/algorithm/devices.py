"""The devices of a run: how its seeds are spread over them, and how programs are compiled for them."""

import contextlib
import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from doublehorizon.algorithm.numbers import SplitConfig, split_config
from doublehorizon.config import Config
from doublehorizon.errors import UserError

Devices = list[Any]
"""Some of JAX's devices, all of one kind."""

_OPTIONS: dict[str, bool | str] = {
    # kernels that do not wait for each other may overlap: an update on an H200 takes 8% less
    "xla_gpu_graph_enable_concurrent_region": True,
    # without this library a fit and an update take 10% less on two CPU cores
    "xla_cpu_experimental_ynn_fusion_type": "",
}


def find_devices(kind: str | None, num_seeds: int) -> Devices:
    """Devices of that kind ("cpu", "gpu"; None: the best there is), as many as share the seeds out evenly."""
    kind = {"auto": None, "cuda": "gpu"}.get(kind or "auto", kind)  # as Stable-Baselines3 names them
    if kind not in (None, "cpu", "gpu"):
        raise UserError(f"device is {kind!r}, but it must be cpu, gpu or auto.")
    try:
        devices = jax.local_devices(backend=kind)
    except (RuntimeError, AssertionError) as problem:
        wanted = kind or os.environ.get("JAX_PLATFORMS")
        hint = " For an NVIDIA GPU: pip install 'doublehorizon[gpu]'." if wanted in ("gpu", "cuda") else ""
        raise UserError(f"device is {wanted!r}, but JAX sees no such device here.{hint}") from problem
    count = next(n for n in range(min(len(devices), num_seeds), 0, -1) if num_seeds % n == 0)
    return devices[:count]


@contextlib.contextmanager
def using(devices: Devices) -> Iterator[None]:
    """Inside, arrays live and programs run on these devices. It holds for the thread that says it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_device(devices[0]))
        if len(devices) > 1:
            stack.enter_context(jax.set_mesh(Mesh(devices, ("seed",), axis_types=(AxisType.Auto,))))
        yield


def over_seeds(function: Callable, *seeded: Any) -> Any:
    """`function(*seeded)`, whose arguments and results have a leading seed axis: on several devices, each works on
    its own seeds without communication."""
    if jax.sharding.get_abstract_mesh().empty:
        return function(*seeded)
    return jax.shard_map(function, in_specs=Spec("seed"), out_specs=Spec("seed"), check_vma=False)(*seeded)


def place(devices: Devices, tree: Any) -> Any:
    """Arrays from the host, which have a leading seed axis, where these devices' programs expect them."""
    if len(devices) == 1:
        return jax.device_put(tree, devices[0])
    mesh = Mesh(devices, ("seed",), axis_types=(AxisType.Auto,))
    return jax.device_put(tree, NamedSharding(mesh, Spec("seed")))


def fetch(tree: Any) -> Any:
    """`jax.device_get` that polls until the results are there, so that signals are handled meanwhile."""
    for leaf in jax.tree.leaves(tree):
        while not leaf.is_ready():
            time.sleep(0.001)
    return jax.device_get(tree)


class Program:
    """A function of records, compiled: arrays and the numbers of a config are traced, everything else is static. It can
    be compiled before it is called, in another thread."""

    def __init__(self, function: Callable, donate: str):
        functools.update_wrapper(self, function)
        self._function, self._donate = function, donate

    @functools.cached_property
    def _jitted(self) -> Any:
        @functools.wraps(self._function)
        def of_split(*arguments: Any) -> Any:
            return self._function(*(x.whole() if isinstance(x, SplitConfig) else x for x in arguments))

        return eqx.filter_jit(of_split, donate=self._donate, compiler_options=_known_options())  # type: ignore

    def __call__(self, *arguments: Any) -> Any:
        return self._jitted(*_split(arguments))

    def compiled(self, *arguments: Any) -> Callable:
        """The program for arguments like these; it starts sooner than a first call, and can't be given others."""
        compiled = self._jitted.lower(*_split(arguments)).compile()
        return lambda *arguments: compiled(*_split(arguments))

    def in_background(self, devices: Devices, *arguments: Any) -> "Background":
        """The same in a thread of its own, for these devices."""

        def work() -> Callable:
            with using(devices):
                return self.compiled(*arguments)

        return Background(work)


def _split(arguments: tuple) -> tuple:
    return tuple(split_config(x) if isinstance(x, Config) else x for x in arguments)


def program(donate: str) -> Callable[[Callable], Program]:
    """Decorator that makes a function a `Program`; `donate` says whose memory it reuses: "none", "all-except-first"."""
    return lambda function: Program(function, donate)


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, unless another is configured: a second start compiles
    little."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(base / "doublehorizon" / "jax"))


def forget_programs(most_mappings: int = 30_000) -> None:
    """Drop compiled programs that nobody uses any more, if they hold many of the memory mappings that Linux grants a
    process (65,530 by default). A program on a CPU has thousands, and beyond the limit XLA crashes: without this, at
    about the tenth agent that one process trains."""
    mappings = Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_bytes().splitlines()) > most_mappings:
        jax.clear_caches()
        gc.collect()


@functools.cache
def _known_options() -> dict[str, bool | str]:
    """Those of the options that this version of XLA has: they come and go with its releases."""
    known = {}
    for name, value in _OPTIONS.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
            known[name] = value
    return known


class Background:
    """What a function returns, computed in a thread of its own. A process that ends waits for it: to end inside the
    compiler would be a crash."""

    def __init__(self, function: Callable[[], Any]):
        self._function = function
        self._result: Any = None
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as problem:  # it is raised where the result is asked for
            self._problem = problem

    def result(self) -> Any:
        self._thread.join()
        if self._problem is not None:
            raise self._problem
        return self._result
