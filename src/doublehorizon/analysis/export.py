"""A trained policy for machines without this package: as an ONNX graph, or as NumPy arrays with the few lines that run
them. Both take the environment's own observations and give actions in its own units. No JAX."""

from pathlib import Path
from typing import Any

import numpy as np

from doublehorizon.acting.policy import NumpyPolicy
from doublehorizon.atomic_files import write_file
from doublehorizon.errors import UserError

RUNNER = '''"""Runs the policy in {npz}. It needs NumPy alone.

    policy = Policy("{npz}")
    action = policy(observation)    # one observation, or a batch of them
"""

import numpy as np


class Policy:
    def __init__(self, path):
        with np.load(path) as file:
            self.arrays = dict(file)
        self.num_layers = sum(name.endswith(".weight") for name in self.arrays)

    def __call__(self, observation):
        a = self.arrays
        x = (np.asarray(observation, np.float32) - a["obs_mean"]) / a["obs_std"]
        for i in range(self.num_layers):
            x = x @ a[f"layer{{i}}.weight"] + a[f"layer{{i}}.bias"]
            if i < self.num_layers - 1:
                x = x * 0.5 * (1.0 + np.tanh(0.5 * x))  # SiLU
        unit = np.tanh(np.split(x, 2, axis=-1)[0])  # the mean; the other half is the spread while learning
        return a["action_low"] + 0.5 * (unit + 1.0) * (a["action_high"] - a["action_low"])
'''


def export_policy(policy: NumpyPolicy, path: Path) -> list[Path]:
    """Writes the policy in the format that the file's name asks for; the files that were written."""
    if path.suffix == ".onnx":
        write_file(path, onnx_model(policy))
        return [path]
    if path.suffix == ".npz":
        return _write_numpy(policy, path)
    raise UserError(f"{path} names no format that is known here: end it in .onnx or .npz.")


def onnx_model(policy: NumpyPolicy) -> bytes:
    """The graph from `observation` `[batch, obs]` to `action` `[batch, act]`, the normaliser and the bounds in it."""
    onnx: Any = _import_onnx()
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    constants: dict[str, np.ndarray] = policy.arrays()
    low, high = constants.pop("action_low"), constants.pop("action_high")
    obs_size, act_size = policy.obs_mean.size, low.size
    constants |= {
        "action_center": 0.5 * (low + high),
        "action_reach": 0.5 * (high - low),
        "begin": np.array([0], np.int64),
        "end": np.array([act_size], np.int64),
        "last_axis": np.array([1], np.int64),
    }
    nodes = [
        helper.make_node("Sub", ["observation", "obs_mean"], ["centered"]),
        helper.make_node("Div", ["centered", "obs_std"], ["hidden0"]),
    ]
    num_layers = len(policy.weights)
    for i in range(num_layers):
        inputs = [f"hidden{i}", f"layer{i}.weight", f"layer{i}.bias"]
        nodes.append(helper.make_node("Gemm", inputs, [f"linear{i}"]))
        if i < num_layers - 1:
            nodes.append(helper.make_node("Sigmoid", [f"linear{i}"], [f"gate{i}"]))
            nodes.append(helper.make_node("Mul", [f"linear{i}", f"gate{i}"], [f"hidden{i + 1}"]))
    nodes += [
        helper.make_node("Slice", [f"linear{num_layers - 1}", "begin", "end", "last_axis"], ["mean"]),
        helper.make_node("Tanh", ["mean"], ["unit"]),
        helper.make_node("Mul", ["unit", "action_reach"], ["scaled"]),
        helper.make_node("Add", ["scaled", "action_center"], ["action"]),
    ]
    graph = helper.make_graph(
        nodes,
        "policy",
        [helper.make_tensor_value_info("observation", float32, ["batch", obs_size])],
        [helper.make_tensor_value_info("action", float32, ["batch", act_size])],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    # old enough for runtimes of several years ago
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def _import_onnx() -> Any:
    try:
        import onnx  # type: ignore[import-not-found]
        import onnx.checker  # type: ignore[import-not-found]
        import onnx.helper  # type: ignore[import-not-found]
        import onnx.numpy_helper  # type: ignore[import-not-found]
    except ImportError as problem:
        raise UserError(
            "ONNX is not installed: pip install 'doublehorizon[onnx]'. A .npz file needs nothing more than NumPy."
        ) from problem
    return onnx


def _write_numpy(policy: NumpyPolicy, path: Path) -> list[Path]:
    import io

    content = io.BytesIO()
    np.savez(content, **policy.arrays())  # type: ignore[arg-type]
    runner = path.with_suffix(".py")
    write_file(path, content.getvalue())
    write_file(runner, RUNNER.format(npz=path.name).encode())
    return [path, runner]
