"""The trained policy in NumPy: what workers act with, what is saved, and all that a robot needs. No JAX.

A policy file is a safetensors file: the actor's weights, the statistics of the observations, the action bounds.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from doublehorizon.errors import UserError
from doublehorizon.scaling import to_own_units

_FORMAT = "doublehorizon-policy-1"
_MIN_ACTION_STD = 1e-5  # as in networks.py


@dataclass(frozen=True)
class NumpyPolicy:
    """A tanh-squashed Gaussian policy; `weights[i]` is `[in, out]`."""

    weights: tuple[np.ndarray, ...]
    biases: tuple[np.ndarray, ...]
    obs_mean: np.ndarray
    obs_std: np.ndarray
    action_low: np.ndarray
    action_high: np.ndarray

    def act(self, obs: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
        """Actions in [-1, 1] for observations `[..., obs]`: the mean without a generator, a sample with one."""
        x = (obs - self.obs_mean) / self.obs_std
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = x @ weight + bias
            x = x * (0.5 * (1.0 + np.tanh(0.5 * x)))  # SiLU, in a form that cannot overflow
        mean, raw_std = np.split(x @ self.weights[-1] + self.biases[-1], 2, axis=-1)
        if rng is not None:
            std = np.logaddexp(0.0, raw_std) + _MIN_ACTION_STD
            mean = mean + std * rng.standard_normal(mean.shape, np.float32)
        return np.tanh(mean)

    def predict(
        self,
        obs: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = True,
        rng: np.random.Generator | None = None,
    ) -> tuple[np.ndarray, Any]:
        """Actions in the environment's own range, for one observation or a batch; `state` is handed back, as
        Stable-Baselines3's callers expect."""
        del episode_start
        flat = np.asarray(obs, np.float32)
        if flat.shape[-1:] != self.obs_mean.shape:
            raise UserError(
                f"the observation has the shape {flat.shape}, but this policy needs (..., {self.obs_mean.size})."
            )
        if deterministic:
            rng = None
        elif rng is None:
            rng = np.random.default_rng()
        unit = self.act(flat, rng)
        return to_own_units(unit, self.action_low, self.action_high), state

    def save(self, path: str | Path) -> None:
        """Writes the policy to one file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {f"layer{i}.weight": w for i, w in enumerate(self.weights)}
        arrays |= {f"layer{i}.bias": b for i, b in enumerate(self.biases)}
        arrays |= {name: getattr(self, name) for name in _STATISTICS}
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, path, {"format": _FORMAT})


_STATISTICS = ("obs_mean", "obs_std", "action_low", "action_high")


def load_policy(path: str | Path) -> NumpyPolicy:
    """Reads a policy file, or the best policy of a run folder."""
    path = Path(path)
    if path.is_dir():
        path = _best_of(path)
    try:
        with safe_open(path, framework="numpy") as file:
            found = (file.metadata() or {}).get("format")
            if found != _FORMAT:
                raise UserError(f"{path} is of the format {found!r}, but {_FORMAT!r} is needed.")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as problem:
        raise UserError(f"{path} cannot be read as a policy: {problem}.") from problem
    num_layers = sum(name.endswith(".weight") for name in arrays)
    return NumpyPolicy(
        tuple(arrays[f"layer{i}.weight"] for i in range(num_layers)),
        tuple(arrays[f"layer{i}.bias"] for i in range(num_layers)),
        **{name: arrays[name] for name in _STATISTICS},
    )


def _best_of(run: Path) -> Path:
    """The policy file of the seed whose last test return was best."""
    files = sorted((run / "policy").glob("seed*.safetensors"), key=lambda file: (len(file.stem), file.stem))
    if not files:
        raise UserError(f"{run} holds no policy (no file policy/seed<k>.safetensors). Give a run folder or a file.")
    last = run / "policy" / "returns.json"
    returns = json.loads(last.read_text()) if last.exists() else {}
    return max(files, key=lambda file: returns.get(file.stem.removeprefix("seed"), -np.inf))
