"""Double Horizon Model-Based Policy Optimization. Names are loaded when used: workers never import JAX."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from doublehorizon import presets as presets
    from doublehorizon.acting.policy import load_policy as load_policy
    from doublehorizon.api import DHMBPO as DHMBPO
    from doublehorizon.config import Config as Config
    from doublehorizon.errors import UserError as UserError
    from doublehorizon.run import trackers as trackers
    from doublehorizon.training import callbacks as callbacks
    from doublehorizon.training.callbacks import Callback as Callback

__version__ = "0.1.0"
__all__ = [
    "DHMBPO",
    "Callback",
    "Config",
    "UserError",
    "__version__",
    "callbacks",
    "load_policy",
    "presets",
    "trackers",
]

_MODULES = {"presets": "presets", "trackers": "run.trackers", "callbacks": "training.callbacks"}
_HOMES = {
    "DHMBPO": "api",
    "Callback": "training.callbacks",
    "Config": "config",
    "UserError": "errors",
    "load_policy": "acting.policy",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"doublehorizon.{_MODULES[name]}")
    if name in _HOMES:
        return getattr(import_module(f"doublehorizon.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'doublehorizon' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
