"""The trained policy in NumPy: what workers act with, what is saved, and all that a robot needs. No JAX.

A policy file is a safetensors file: the actor's weights, the statistics of the observations, the action bounds, and
how an observation is laid out where it is no vector.
"""

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from doublehorizon.action_scaling import MIN_ACTION_STD, to_own_units
from doublehorizon.atomic_files import digest, read_json, require_regular, unpacked, write_file
from doublehorizon.envs.obs_layout import ObsLayout
from doublehorizon.errors import UserError

_PLAIN, _WITH_LAYOUT = "doublehorizon-policy-1", "doublehorizon-policy-2"


@dataclass(frozen=True)
class NumpyPolicy:
    """A tanh-squashed Gaussian policy; `weights[i]` is `[in, out]`. With a layout, `predict` takes observations with
    names or parts; `act` and `sample` always take vectors."""

    weights: tuple[np.ndarray, ...]
    biases: tuple[np.ndarray, ...]
    obs_mean: np.ndarray
    obs_std: np.ndarray
    action_low: np.ndarray
    action_high: np.ndarray
    layout: ObsLayout | None = None

    def __repr__(self) -> str:
        sizes = " -> ".join(str(weight.shape[0]) for weight in self.weights)
        low, high = float(self.action_low.min()), float(self.action_high.max())
        names = "" if self.layout is None else f"; observations: {self.layout}"
        return f"NumpyPolicy({sizes} -> {self.act_size}, actions within [{low:g}, {high:g}]{names})"

    @property
    def act_size(self) -> int:
        """Numbers of an action."""
        return self.action_low.size

    def act(self, obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Actions in [-1, 1] for observations `[..., obs]`: the mode, or a sample by standard normal noise
        `[..., act]`."""
        mean, std = self._mean_and_std(obs)
        return np.tanh(mean if noise is None else mean + std * noise)

    def sample(self, obs: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Sampled actions in [-1, 1], and their log-probabilities."""
        mean, std = self._mean_and_std(obs)
        noise = rng.standard_normal(mean.shape, np.float32)
        unsquashed = mean + std * noise
        log_prob = -0.5 * np.square(noise) - np.log(std) - 0.5 * np.log(2.0 * np.pi)
        log_derivative = 2.0 * (np.log(2.0) - unsquashed - np.logaddexp(0.0, -2.0 * unsquashed))  # of tanh
        return np.tanh(unsquashed), np.asarray(np.sum(log_prob - log_derivative, axis=-1))

    def _mean_and_std(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the Gaussian before squashing."""
        x = (obs - self.obs_mean) / self.obs_std
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = x @ weight + bias
            x = x * (0.5 * (1.0 + np.tanh(0.5 * x)))  # SiLU, in a form that cannot overflow
        out = x @ self.weights[-1] + self.biases[-1]
        mean, raw_std = out[..., : self.act_size], out[..., self.act_size :]
        return mean, np.logaddexp(0.0, raw_std) + MIN_ACTION_STD

    def predict(
        self,
        obs: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = True,
        rng: np.random.Generator | None = None,
    ) -> tuple[np.ndarray, Any]:
        """Actions in the environment's own range and shape, for one observation or a batch; `state` is returned as it
        came, as Stable-Baselines3's callers expect."""
        del episode_start
        flat = self._vectors(obs) if self.layout is None else self.layout.flatten(obs)
        if not np.isfinite(flat).all():
            raise UserError(f"{self._first_wrong(flat)}, but this policy needs finite numbers.")
        noise = None
        if not deterministic:
            rng = np.random.default_rng() if rng is None else rng
            noise = rng.standard_normal((*flat.shape[:-1], self.act_size), np.float32)
        action = to_own_units(self.act(flat, noise), self.action_low, self.action_high)
        shape = self.action_low.shape if self.layout is None else self.layout.act_shape
        return action.reshape((*flat.shape[:-1], *shape)), state

    def _vectors(self, obs: Any) -> np.ndarray:
        try:
            flat = np.asarray(obs, np.float32)
        except (TypeError, ValueError) as problem:
            raise UserError(
                f"the observation is a {type(obs).__name__}, but this policy needs numbers (..., {self.obs_mean.size})."
            ) from problem
        if flat.shape[-1:] != self.obs_mean.shape:
            raise UserError(
                f"the observation has the shape {flat.shape}, but this policy needs (..., {self.obs_mean.size})."
            )
        return flat

    def _first_wrong(self, flat: np.ndarray) -> str:
        """Which number of an observation is not finite."""
        *_, at = np.argwhere(~np.isfinite(flat))[0]
        name = f"its number {at}" if self.layout is None else self.layout.names[at]
        return f"the observation has {name} {flat[~np.isfinite(flat)][0]}"

    def save(self, path: str | Path) -> None:
        """Writes the policy to one file."""
        arrays = self.arrays()
        if self.layout is None:
            about = f"{_PLAIN}:{_digest(arrays)}"
        else:
            layout = json.dumps(self.layout.to_json(), separators=(",", ":"))
            about = f"{_WITH_LAYOUT}:{_digest(arrays, layout)}:{layout}"
        # one entry only: safetensors writes several in any order, and equal policies shall be equal files
        write_file(Path(path), save(arrays, {"format": about}))

    def arrays(self) -> dict[str, np.ndarray]:
        """All its numbers, by name; `from_arrays` is the inverse, but for the layout."""
        arrays = {f"layer{i}.weight": w for i, w in enumerate(self.weights)}
        arrays |= {f"layer{i}.bias": b for i, b in enumerate(self.biases)}
        arrays |= {name: getattr(self, name) for name in _STATISTICS}
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


_STATISTICS = ("obs_mean", "obs_std", "action_low", "action_high")


def best_policy_file(run: Path) -> Path:
    """Where a run keeps the policy with the best test return so far, of any seed."""
    return run / "policy" / "best.safetensors"


def load_policy(path: str | Path, best: bool = False) -> NumpyPolicy:
    """Reads a policy file, or the best policy of a run folder or of an agent that `save` wrote: by the seeds' last test
    returns or, with `best`, by all tests of a run."""
    path = Path(path)
    if path.suffix == ".zip" and path.is_file():
        return _of_one_file(path, best)
    if best or path.is_dir():
        path = _best_of_all(path) if best else _best_of(path)
    try:
        require_regular(path)
        with safe_open(path, framework="numpy") as file:
            found, _, rest = (file.metadata() or {}).get("format", "").partition(":")
            if found not in (_PLAIN, _WITH_LAYOUT):
                raise UserError(f"{path} is of the format {found!r}, but {_PLAIN!r} or {_WITH_LAYOUT!r} is needed.")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as problem:
        if path.suffix in (".npz", ".onnx"):
            raise UserError(
                f"{path} was exported for use elsewhere. Give the run folder, or one of its policy/seed<k>.safetensors."
            ) from problem
        raise UserError(f"{path} cannot be read as a policy: {problem}.") from problem
    expected, _, layout = rest.partition(":")
    if _digest(arrays, layout) != expected or (layout != "") != (found == _WITH_LAYOUT):
        raise UserError(f"{path} is damaged: its numbers are not those that were saved.")
    try:
        return from_arrays(arrays, ObsLayout.from_json(json.loads(layout)) if layout else None)
    except (LookupError, TypeError, ValueError, AttributeError) as problem:
        raise UserError(f"{path} cannot be read as a policy: {problem}.") from problem


def _digest(arrays: dict[str, np.ndarray], layout: str = "") -> str:
    parts = [f"{name}{x.dtype}{x.shape}".encode() + x.tobytes() for name, x in sorted(arrays.items())]
    return digest(b"".join(parts) + layout.encode())


def from_arrays(arrays: dict[str, np.ndarray], layout: ObsLayout | None = None) -> NumpyPolicy:
    """The inverse of `NumpyPolicy.arrays`; what does not fit together is a `ValueError`."""
    num_layers = sum(name.endswith(".weight") for name in arrays)
    names = [f"layer{i}.{part}" for part in ("weight", "bias") for i in range(num_layers)]
    if num_layers == 0 or set(arrays) != {*names, *_STATISTICS}:
        raise ValueError(f"its arrays are {', '.join(sorted(arrays)) or 'none'}")
    policy = NumpyPolicy(
        tuple(arrays[name] for name in names[:num_layers]),
        tuple(arrays[name] for name in names[num_layers:]),
        **{name: arrays[name] for name in _STATISTICS},
        layout=layout,
    )
    _check_shapes(policy)
    return policy


def _check_shapes(policy: NumpyPolicy) -> None:
    sizes = [policy.obs_mean.size, *(bias.size for bias in policy.biases)]
    layout = policy.layout and (policy.layout.size, math.prod(policy.layout.act_shape))
    shapes = {
        "weights": [w.shape for w in policy.weights] == list(pairwise(sizes)),
        "biases": all(b.ndim == 1 for b in policy.biases),
        "observations": policy.obs_mean.shape == policy.obs_std.shape == (sizes[0],),
        "actions": policy.action_low.shape == policy.action_high.shape == (sizes[-1] // 2,) and sizes[-1] % 2 == 0,
        "entries": layout in (None, (sizes[0], policy.act_size)),
        "numbers": all(array.dtype == np.float32 for array in policy.arrays().values()),
    }
    wrong = [name for name, fits in shapes.items() if not fits]
    if wrong:
        raise ValueError(f"its {wrong[0]} do not fit together")


def _of_one_file(path: Path, best: bool) -> NumpyPolicy:
    """The best policy of an agent in one file."""
    if best:
        raise UserError(f"{path} holds the seeds' last policies alone: the folder of a run has the best of all tests.")
    with unpacked(path, "policy/") as folder:
        return load_policy(folder)


def _best_of(run: Path) -> Path:
    """The policy file of the seed whose last test return was best."""
    files = sorted((run / "policy").glob("seed*.safetensors"), key=lambda file: (len(file.stem), file.stem))
    if not files:
        raise UserError(f"{run} holds no policy (no file policy/seed<k>.safetensors). Give a run folder or a file.")
    returns = _last_returns(run / "policy" / "returns.json")
    return max(files, key=lambda file: returns.get(file.stem.removeprefix("seed"), -np.inf))


def _best_of_all(run: Path) -> Path:
    """The file that a run keeps of its best test."""
    file = best_policy_file(run)
    if not file.is_file():
        raise UserError(
            f"{run} holds no {file.relative_to(run)}. A run has it from its first test of a learnt policy on; those of "
            "older versions have none."
        )
    return file


def _last_returns(path: Path) -> dict[str, float]:
    if not path.exists():
        return {}
    try:
        return {str(seed): float(value) for seed, value in read_json(path).items()}
    except (OSError, ValueError, TypeError, AttributeError) as problem:
        raise UserError(f"{path} is damaged ({problem}): name one of the policy files beside it.") from problem
