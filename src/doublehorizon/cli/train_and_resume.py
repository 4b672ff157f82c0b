"""What `train` and `resume` share: a user's functions by name, trackers, and what is printed at the end."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
from rich.console import Console

from doublehorizon.acting.policy import best_policy_file
from doublehorizon.cli.options import resume_command
from doublehorizon.envs.make import imported
from doublehorizon.errors import RunError, UserError
from doublehorizon.run.run_reader import NO_GAIN, no_gain
from doublehorizon.run.trackers import TensorBoard, Tracker, WandB
from doublehorizon.signals import Stopped

if TYPE_CHECKING:
    from doublehorizon.api import DHMBPO


def function(name: str | None, purpose: str) -> Callable | None:
    """What `module:function` names."""
    if name is not None and ":" not in name:
        raise UserError(f"{name!r} names no function. Write module:function, one that {purpose}.")
    return None if name is None else imported(name, purpose)


def seed_policy(name: str | None) -> Any:
    """A file, or module:function."""
    if name is None or Path(name).exists() or ":" not in name:
        return name
    return function(name, "returns an action for an observation")


def functions(termination_rule: str | None, reward: str | None, policy: str | None) -> dict[str, Any]:
    """A user's own functions, as `DHMBPO` takes them."""
    return {
        "termination_rule": function(termination_rule, "says of next observations whether they end an episode"),
        "reward": function(reward, "returns rewards"),
        "seed_policy": seed_policy(policy),
    }


def starting(what: str, quiet: bool) -> AbstractContextManager:
    """Says on a terminal what the first seconds are for."""
    return nullcontext() if quiet else Console(stderr=True, emoji=False).status(f"starting JAX, and looking at {what}")


@contextmanager
def with_resume_hint(model: "DHMBPO", folder: Path, options: Any) -> Iterator[None]:
    """A run that ends before its goal says where it stands and how it goes on, with the functions in the options."""
    from doublehorizon.run.checkpoint_writer import steps_kept  # imports JAX, which the model has done too

    try:
        yield
    except (Stopped, RunError, UserError, OSError) as problem:
        kept = steps_kept(folder) if model.run_folder == folder.resolve() else []
        if kept:
            again = resume_command(folder, model.spec.name, options)
            problem.add_note(f"The run is saved up to step {kept[-1]}; go on with: {again}")
        raise


@contextmanager
def closing_env(model: "DHMBPO") -> Iterator[None]:
    """A single environment was made for this command, and is closed with it, however that ends."""
    try:
        yield
    finally:
        if model.env_source.is_single:
            model.get_env().close()


@contextmanager
def tracked(folder: Path, tensorboard: bool, wandb: bool) -> Iterator[list[Tracker]]:
    """The trackers that were asked for, in the run folder."""
    chosen: list[Tracker] = []
    if tensorboard:
        chosen.append(TensorBoard(folder / "tensorboard"))
    if wandb:
        chosen.append(WandB(folder, run=str(folder)))
    try:
        yield chosen
    finally:
        for tracker in chosen:
            tracker.close()


def report(model: "DHMBPO", folder: Path, as_json: bool) -> None:
    """The result on stdout."""
    from doublehorizon.training.callbacks import SaveBest  # imports JAX, which the model has done too
    from doublehorizon.training.live_view import with_spread

    returns = model.last_returns()
    if as_json:
        print(json.dumps({"run": str(folder), "returns": returns}))
        return
    if returns:
        progress: Any = model.progress
        words = with_spread(returns, progress.state.last_spreads, model.evaluation_episodes)
        print(f"final test return: {words}{_how_good(model)}")
    kept = SaveBest(best_policy_file(folder))
    best = kept.best()
    if best is not None:  # where returns come and go, the last policy is not the one to take away
        print(f"best test return: {best.value:.5g} (seed {best.seed}, step {best.step}), kept in {kept.path}")
    print(f"run folder: {folder}")
    if model.progress is not None and no_gain(model.progress.returns):
        print(NO_GAIN)


def _how_good(model: "DHMBPO") -> str:
    """What a return can be measured by: the test at the start, and what is known of the task."""
    at_start = {} if model.progress is None else model.progress.returns.get(0, {})
    told = f"; at the start it was {sum(at_start.values()) / len(at_start):.5g}" if at_start else ""
    name = model.spec.name
    registered = gym.registry.get(name) if model.spec.registered else None
    if registered is not None and registered.reward_threshold is not None:
        told += f"; Gymnasium calls {name} solved at {registered.reward_threshold:g}"
    return told + ("; 1000 is the most there is" if name.startswith("dmc/") else "")
