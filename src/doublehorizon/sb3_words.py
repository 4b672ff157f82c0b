"""What people who know Stable-Baselines3 try, each with what does the same here; what is of a wrong kind is told."""

import inspect
from collections.abc import Callable
from functools import wraps
from numbers import Integral
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from doublehorizon.config import Config
from doublehorizon.config_json import read_config
from doublehorizon.errors import UserError, unknown
from doublehorizon.presets import preset

P = ParamSpec("P")
R = TypeVar("R")

OPTIONS = {
    "gamma": "--policy.discount",
    "learning_rate": "--policy.learning-rate",
    "batch_size": "--policy.batch-size",
    "tau": "--critic.target-rate",
    "ent_coef": "--policy.initial-temperature",
    "target_entropy": "--policy.target-entropy-per-action",
    "buffer_size": "--loop.replay-capacity",
    "learning_starts": "--loop.seed-episodes",
    "gradient_steps": "--updates-per-step",
    "train_freq": "--loop.steps-per-iteration",
    "eval_freq": "--loop.evaluate-every",
    "n_envs": "--num-envs",
    "total_timesteps": "--steps",
    "policy_kwargs": "--policy.width",
    "tensorboard_log": "--tensorboard",
    "verbose": "--quiet",
}
"""Numbers and switches, by their names on the command line."""

_CONFIG = "give config=dh.Config().with_({}=...), or a preset such as dh.presets.quick in place of dh.Config()"
INSTEAD = {
    name: _CONFIG.format(option[2:].replace(".", "__").replace("-", "_"))
    for name, option in OPTIONS.items()
    if "." in option
} | {
    "policy": "there is one kind of policy; its width is config=dh.Config().with_(policy__width=...)",
    "verbose": "learn(..., progress_bar=True) shows how it goes",
    "tensorboard_log": "give learn(..., trackers=[dh.trackers.TensorBoard(folder)])",
    "tb_log_name": "give trackers=[dh.trackers.TensorBoard(folder)]",
    "log_interval": "figures are written after every iteration, to progress.csv in the folder out",
    "reset_num_timesteps": "learn() goes on from where the agent stands; a new agent starts at 0",
    "eval_env": "give callback=dh.callbacks.EvaluateOn(env)",
    "ent_coef": "the temperature is tuned; " + _CONFIG.format("policy__initial_temperature"),
    "gradient_steps": _CONFIG.format("policy__updates_per_step"),
    "n_envs": _CONFIG.format("loop__num_envs"),
    "n_eval_episodes": "give episodes=...",
    "preset": 'give config="quick", or the name of another preset',
}


def explains_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """The same function; a keyword that it does not have is answered in one line."""
    known = inspect.signature(function).parameters

    most = sum(one.kind is not one.KEYWORD_ONLY for one in known.values())

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > most:
            raise _too_many(args[1:], list(known)[1:most])
        for name in kwargs:
            if name not in known:
                raise _refusal(name, [key for key in known if key != "self"])
        return function(*args, **kwargs)

    return checked


def _too_many(given: tuple, places: list[str]) -> UserError:
    hint = " There is one kind of policy, which is not named." if "MlpPolicy" in given else ""
    shown = ", ".join(map(repr, given))
    return UserError(f"({shown}) is too much: only {', '.join(places)} may be given without its name.{hint}")


def require_whole(**values: Any) -> None:
    """Each must be a whole number."""
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise UserError(f"{name} is {value!r}, but a whole number is needed.")


def as_config(given: Config | str | Path | None) -> Config:
    """A config, the preset of that name, or the config in a file; the default for None."""
    if isinstance(given, Path) or (isinstance(given, str) and given.endswith(".json")):
        return read_config(Path(given))
    if isinstance(given, str):
        return preset(given)
    if given is None or isinstance(given, Config):
        return given or Config()
    raise UserError(
        f"config is {type(given).__name__}, but dh.Config(), the name of a preset or a file's is needed; "
        "dh.Config().with_(policy__width=64) changes a value."
    )


def _refusal(name: str, known: list[str]) -> UserError:
    if name in INSTEAD:
        return UserError(f"there is no keyword {name!r} here: {INSTEAD[name]}.")
    return unknown("keyword", name, known)
