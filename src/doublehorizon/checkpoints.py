"""A trained agent as a folder: arrays in safetensors, the rest in JSON. Nothing in it can execute code."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from doublehorizon import __version__
from doublehorizon.config import Config
from doublehorizon.devices import Devices
from doublehorizon.envs.make import EnvSpec
from doublehorizon.errors import UserError
from doublehorizon.progress import Knowledge, Progress, begin
from doublehorizon.records import from_json, to_json

_FORMAT = "doublehorizon-agent-2"


def save(progress: Progress, folder: Path) -> None:
    """Writes everything that learning changes: `agent.json`, `state.safetensors`, `replay.safetensors`. An agent that
    was there before is replaced only when the new one is complete."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    about = {
        "format": _FORMAT,
        "version": __version__,
        "config": to_json(progress.config),
        "env": progress.spec.facts(),
        "seeds": progress.seeds,
        "iteration": progress.iteration,
        "seconds": progress.seconds,
        "capacity": progress.replay.rows.reward.shape[1],
        "prior_rows": progress.prior_rows,
        "reward": progress.knowledge.reward is not None,
        "returns": progress.returns,
    }
    save_file(_arrays(progress.state), partial / "state.safetensors")
    save_file(_arrays(progress.replay), partial / "replay.safetensors")
    (partial / "agent.json").write_text(json.dumps(about, indent=1) + "\n")
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def read_about(folder: Path) -> tuple[Config, dict[str, Any]]:
    """The config and the facts of a saved agent, without its arrays."""
    try:
        about = json.loads((folder / "agent.json").read_text())
    except (OSError, ValueError) as problem:
        raise UserError(f"{folder} is not a saved agent: {problem}.") from problem
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise UserError(f"{folder} was not written by this version of doublehorizon ({__version__}).")
    return from_json(about["config"]), about


def load(folder: Path, spec: EnvSpec, devices: Devices | None = None, knowledge: Knowledge | None = None) -> Progress:
    """The inverse of `save`, for an environment with the same spaces."""
    config, about = read_about(folder)
    now = json.loads(json.dumps(spec.facts()))
    for name in ("obs_size", "act_size", "time_limit", "action_low", "action_high"):
        if about["env"][name] != now[name]:
            raise UserError(f"{folder} was trained with {name} {about['env'][name]}, but {spec.name} has {now[name]}.")
    knowledge = knowledge or Knowledge()
    for what, then, now_given in (
        ("termination_rule", about["env"]["termination"] == "known", spec.terminates is not None),
        ("reward", about["reward"], knowledge.reward is not None),
    ):
        if then and not now_given:
            raise UserError(f"{folder} was trained with a {what} of its own: pass it again, load(path, {what}=...).")
    spec = replace(spec, termination=about["env"]["termination"])  # a rule that was found wrong stays given up
    progress = begin(config, spec, about["seeds"], about["capacity"], devices, knowledge)
    progress.prior_rows = about["prior_rows"]
    try:
        progress.state = _restored(progress.state, load_file(folder / "state.safetensors"))
        progress.replay = _restored(progress.replay, load_file(folder / "replay.safetensors"))
    except (OSError, SafetensorError, KeyError, ValueError) as problem:
        raise UserError(f"{folder} is damaged or from another version: {problem}.") from problem
    progress.iteration, progress.seconds = about["iteration"], about["seconds"]
    if progress.iteration >= progress.first_fit:
        progress.policies = progress.fetch_policies()
    progress.returns = {
        int(step): {int(seed): value for seed, value in row.items()} for step, row in about["returns"].items()
    }
    return progress


def _arrays(tree: Any) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.ascontiguousarray(_plain(leaf)) for path, leaf in leaves}


def _plain(leaf: jax.Array) -> np.ndarray:
    return np.asarray(jr.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def _restored(tree: Any, arrays: dict[str, np.ndarray]) -> Any:
    def one(path: tuple, leaf: jax.Array) -> jax.Array:
        name, stored = jax.tree_util.keystr(path), arrays[jax.tree_util.keystr(path)]
        if stored.shape != _plain(leaf).shape or stored.dtype != _plain(leaf).dtype:
            raise ValueError(f"{name} is {stored.dtype}{stored.shape}")
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        value = jr.wrap_key_data(jnp.asarray(stored)) if is_key else jnp.asarray(stored)
        return jax.device_put(value, leaf.sharding)  # each seed on its own device

    return jax.tree.map_with_path(one, tree)
