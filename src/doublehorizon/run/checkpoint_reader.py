"""Reads checkpoints back. Whatever a file holds, it is either what was written or is reported as damaged."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from doublehorizon import __version__
from doublehorizon.algorithm.agent import untrained
from doublehorizon.algorithm.devices import Devices, find_devices, place
from doublehorizon.algorithm.replay_buffer import ReplayBuffer
from doublehorizon.atomic_files import MOST_ARRAYS, digest, existing_folder, read_file, read_json
from doublehorizon.config import Config
from doublehorizon.config_json import from_run
from doublehorizon.envs.env_source import adapted
from doublehorizon.envs.make import EnvSpec, Termination
from doublehorizon.errors import UserError
from doublehorizon.run import replay_files
from doublehorizon.run.checkpoint_writer import FORMAT, canonical, machine, steps_kept
from doublehorizon.run.prior_knowledge import PriorKnowledge, make_task
from doublehorizon.run.progress import (
    Machinery,
    Progress,
    RunSetup,
    capacity_for,
    fetch_policies,
    largest_capacity,
)
from doublehorizon.run.replay_files import Archived, DamageError
from doublehorizon.run.resources import needs, require_room
from doublehorizon.run.run_state import decode
from doublehorizon.schedule import steps_per_iteration

_WRONG = (LookupError, TypeError, ValueError, AttributeError, OverflowError, UserError)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint whose files are whole, not yet put together."""

    path: Path
    config: Config
    env: dict[str, Any]
    seeds: list[int]
    goal: int
    given: list[str]
    machine: dict[str, Any]
    about: dict[str, Any]
    arrays: dict[str, np.ndarray]
    rows: replay_files.ReplayArrays

    def registered_id(self) -> str:
        """The name by which its environment can be made again. What a file names is not imported."""
        name = self.env.get("name")
        if not self.env.get("registered") or not isinstance(name, str) or ":" in name:
            raise UserError(
                f"{self.path.parents[1]} was not trained on a registered id but on {name!r}: pass the environment too, "
                f"load(path, env=...) or --env {name if ':' in str(name) else 'module:function'}."
            )
        return name


def read_newest(folder: Path) -> tuple[SavedCheckpoint, list[str]]:
    """The newest checkpoint of a run that is whole, and a line about each newer one that is not."""
    problems: list[str] = []
    steps = steps_kept(folder)
    for step in reversed(steps):
        try:
            return _read(folder, step), problems
        except DamageError as problem:
            problems.append(f"the checkpoint at step {step} cannot be used: {problem}")
    if not folder.exists():
        also = folder.with_name(f"{folder.name}.zip")
        hint = f" There is {also}." if also.is_file() else ""
        raise UserError(f"{folder} does not exist.{hint} Give the folder of a run, or what save() wrote.")
    if not steps:
        raise UserError(
            f"{folder} holds no checkpoint. Give the folder of a run, or one that save() wrote; a run that was stopped "
            "before its first checkpoint is started again with train."
        )
    raise UserError(f"{folder} holds no checkpoint that is whole; {problems[0]}.")


def read_step(folder: Path, step: int) -> SavedCheckpoint:
    """The checkpoint at that step."""
    steps = steps_kept(folder)
    if step not in steps:
        raise UserError(f"{folder} has no checkpoint at step {step}. It has: {', '.join(map(str, steps)) or 'none'}.")
    try:
        return _read(folder, step)
    except DamageError as problem:
        raise UserError(f"the checkpoint at step {step} of {folder} cannot be used: {problem}.") from problem


def learnt_steps(folder: Path) -> list[int]:
    """The checkpoints at which something had been learnt, but for those that cannot be read."""

    def is_learnt(step: int) -> bool:
        try:
            return bool(_read_about(existing_folder(folder / "checkpoints" / str(step)))["learnt"])
        except (DamageError, UserError, LookupError):
            return False

    return [step for step in steps_kept(folder) if is_learnt(step)]


def restore(
    saved: SavedCheckpoint, spec: EnvSpec, devices: Devices | None = None, knowledge: PriorKnowledge | None = None
) -> tuple[Progress, list[str]]:
    """The run as it stood, for an environment with the same spaces, and what is not as it was then."""
    knowledge = knowledge or PriorKnowledge()
    devices = devices or find_devices(None, len(saved.seeds))
    spec, assumed = adapted(spec, saved.env, str(saved.path))
    _check_functions(saved, spec, knowledge)
    require_room(needs(saved.config, spec, len(saved.seeds), saved.goal, int(saved.about["prior_rows"])), devices, None)
    try:
        spec = replace(spec, termination=saved.env["termination"])  # a rule that was found wrong stays given up
        progress = _assembled(saved, spec, devices, knowledge)
    except (MemoryError, *_WRONG) as problem:
        raise UserError(f"{saved.path} does not fit together: {_line(problem)}") from problem
    if assumed:
        progress.update(episodes={})  # those that were running were another environment's
    now, then = machine(devices), saved.machine
    changes = [f"{name} {then.get(name)} is now {now[name]}" for name in now if then.get(name) != now[name]]
    facts = spec.facts()
    changes += [
        f"the environment's {name} {saved.env.get(name)} is now {facts[name]}"
        for name in ("name", "terminates")
        if saved.env.get(name) != facts[name]
    ]
    notes = [f"the run goes on, but not bit for bit as it would have: {', '.join(changes)}"] if changes else []
    return progress, notes + assumed


def _read(folder: Path, step: int) -> SavedCheckpoint:
    path = existing_folder(folder / "checkpoints" / str(step))
    about = _read_about(path)
    config = _read_config(path, about)
    try:
        content = read_file(path / "state.safetensors", MOST_ARRAYS)
        if digest(content) != about["state"]:
            raise DamageError("its state.safetensors is damaged")
        steps = steps_per_iteration(config, about["env"]["time_limit"])
        stored = about["prior_rows"] + about["iteration"] * steps
        archived = Archived(about["replay"]["rows"], about["replay"]["digest"])
        if stored != archived.rows or about["iteration"] * steps * about["env"]["action_repeat"] != step:
            raise DamageError("its numbers contradict each other")
        most = largest_capacity(config, about["env"]["time_limit"], about["prior_rows"])
        rows = replay_files.read(folder / "replay", archived, min(stored, most))
        seeds, goal = [int(seed) for seed in about["seeds"]], int(about["goal"])
        if about["env"]["termination"] not in get_args(Termination):
            raise DamageError(f"its termination is {about['env']['termination']!r}")
        if not seeds or seeds != list(range(seeds[0], seeds[0] + len(seeds))):
            raise DamageError(f"its seeds are {seeds}")
        given, computer = [str(name) for name in about["given"]], dict(about["machine"])
        return SavedCheckpoint(
            path, config, dict(about["env"]), seeds, goal, given, computer, about, load(content), rows
        )
    except (FileNotFoundError, SafetensorError, *_WRONG) as problem:
        raise DamageError(_line(problem)) from problem
    except (OSError, MemoryError) as problem:
        raise UserError(f"{path} cannot be read: {_line(problem)}.") from problem


def _raise_if_passing(path: Path, problem: BaseException) -> None:
    """A disk that cannot be read just now is no damage."""
    if isinstance(problem, OSError) and not isinstance(problem, FileNotFoundError | NotADirectoryError):
        raise UserError(f"{path} cannot be read: {_line(problem)}.") from problem


def _read_config(path: Path, about: dict[str, Any]) -> Config:
    try:
        return from_run(about["config"])
    except (RecursionError, *_WRONG) as problem:
        if about["version"] != __version__:
            raise UserError(
                f"{path} was written by doublehorizon {about['version']}, and this is {__version__}: {_line(problem)}"
            ) from problem
        raise DamageError(f"its config is damaged: {_line(problem)}") from problem


def _line(problem: BaseException) -> str:
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]


def _read_about(path: Path) -> dict[str, Any]:
    try:
        sealed = read_json(path / "checkpoint.json")
        about = sealed["checkpoint"]
        whole = digest(canonical(about)) == sealed["digest"]
        found, version = about["format"], about["version"]
    except (OSError, RecursionError, *_WRONG) as problem:
        _raise_if_passing(path, problem)
        raise DamageError(f"its checkpoint.json cannot be read ({_line(problem)})") from problem
    if not whole:
        raise DamageError("its checkpoint.json is damaged")
    if found != FORMAT:
        raise UserError(
            f"{path} was written by doublehorizon {version} in the format {found!r}, but this is {__version__}, which "
            f"reads {FORMAT!r}. Install that version to go on with it."
        )
    return about


def _check_functions(saved: SavedCheckpoint, spec: EnvSpec, knowledge: PriorKnowledge) -> None:
    """Those that the run had must be given again, and no others."""
    for what in ("reward", "seed_policy"):
        if what in knowledge.given and what not in saved.given:
            raise UserError(f"{saved.path} was trained without a {what}; with one it would be another run.")
    for what, then, is_given in (
        ("termination_rule", saved.env.get("termination") == "known", spec.terminates is not None),
        ("reward", "reward" in saved.given, knowledge.reward is not None),
    ):
        if then and not is_given:
            raise UserError(
                f"{saved.path} was trained with a {what} of its own: pass it again, load(path, {what}=...) or "
                f"--{what.replace('_', '-')} module:function."
            )


def _assembled(saved: SavedCheckpoint, spec: EnvSpec, devices: Devices, knowledge: PriorKnowledge) -> Progress:
    about, config, prior_rows = saved.about, saved.config, int(saved.about["prior_rows"])
    capacity = capacity_for(config, spec, saved.goal, prior_rows)
    seeds = jax.ShapeDtypeStruct((len(saved.seeds),), jnp.int32)
    task = make_task(spec, knowledge)
    agent_shapes, replay_shapes = eqx.filter_eval_shape(untrained, config, task, capacity, seeds)
    setup = RunSetup(config, spec, saved.seeds, devices, knowledge, prior_rows, saved.given)
    state = decode(about, saved.arrays, agent_shapes, spec)
    agent = place(devices, state.agent)
    policies = fetch_policies(setup, agent) if about["learnt"] else None
    archived = Archived(about["replay"]["rows"], about["replay"]["digest"])
    replay = place(devices, _replay(replay_shapes, saved.rows, int(about["replay"]["rows"])))
    progress = Progress(setup, replace(state, agent=agent, policies=policies), Machinery(replay, archived))
    progress.leave_out(state.left_out)
    return progress


def _replay(shapes: ReplayBuffer, rows: replay_files.ReplayArrays, num_stored: int) -> ReplayBuffer:
    """The rows where they stood in the ring: number `i` at `i` modulo its length."""
    capacity, groups = shapes.rows.reward.shape[1], shapes.held_out.shape[1]

    def ring(path: tuple, shape: Any) -> np.ndarray:
        name = path[-1].name
        if name == "position":
            return np.full(shape.shape, num_stored % capacity, shape.dtype)
        stored = num_stored * groups // capacity if name == "held_out" else num_stored
        full: Any = np.zeros(shape.shape, shape.dtype)
        if stored:
            kept = rows[name][:, -full.shape[1] :]
            if kept.shape[0] != full.shape[0] or kept.shape[2:] != full.shape[2:] or kept.dtype != full.dtype:
                raise ValueError(f"the replay's {name} is {kept.dtype}{kept.shape}, not {full.dtype}{full.shape}")
            full[:, np.arange(stored - kept.shape[1], stored) % full.shape[1]] = kept
        return full

    return jax.tree.map_with_path(ring, shapes)
