"""A trained policy for machines without this package: as an ONNX graph, or as NumPy arrays with the few lines that run
them. Both take the environment's own observations and give actions in its own units. No JAX."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from doublehorizon.acting.policy import NumpyPolicy
from doublehorizon.atomic_files import write_file
from doublehorizon.envs.obs_layout import ObsEntry, ObsLayout
from doublehorizon.errors import UserError

RUNNER = '''"""Runs a policy that doublehorizon has exported. It needs NumPy alone.

    policy = Policy()
    action = policy(observation)    # one observation, or a batch of them
"""

import numpy as np
{layout}

class Policy:
    def __init__(self, path={npz!r}):
        with np.load(path) as file:
            self.arrays = dict(file)
        self.num_layers = sum(name.endswith(".weight") for name in self.arrays)

    def __call__(self, observation):
        a = self.arrays
        x = ({vector} - a["obs_mean"]) / a["obs_std"]
        if not np.isfinite(x).all():
            raise ValueError(f"the observation {{observation}} has numbers that are not finite")
        for i in range(self.num_layers):
            x = x @ a[f"layer{{i}}.weight"] + a[f"layer{{i}}.bias"]
            if i < self.num_layers - 1:
                x = x * 0.5 * (1.0 + np.tanh(0.5 * x))  # SiLU
        unit = np.tanh(np.split(x, 2, axis=-1)[0])  # the mean; the other half is the spread while learning
        {give} a["action_low"] + 0.5 * (unit + 1.0) * (a["action_high"] - a["action_low"])
'''

SHAPED = "        return action.reshape((*x.shape[:-1], *ACTION_SHAPE))\n"

LAYOUT = '''
# What an observation is made of, in the order in which the network takes it: where each entry is found, its shape, and
# for discrete ones how many values each of its numbers may take, and the first of them.
ENTRIES = [
{entries}
]
ACTION_SHAPE = {act_shape}


def flatten(observation):
    """One observation, or a batch of them, as the vector that the network takes."""
    parts = [flat_entry(observation, **entry) for entry in ENTRIES]
    leads = [part.shape[:-1] for part in parts]
    if len(set(leads)) > 1:
        raise ValueError(f"the entries are batches of the shapes {{leads}}, but one for all is needed")
    return np.concatenate(parts, axis=-1)


def flat_entry(observation, path, shape, choices, start):
    name, value = ".".join(map(str, path)) or "observation", observation
    for depth, key in enumerate(path):
        check_keys(value, path[:depth])
        value = value[key]
    value = np.asarray(value)
    lead = value.shape[: value.ndim - len(shape)]
    if value.shape[len(lead) :] != shape or value.dtype.kind not in "biuf":
        raise ValueError(f"{{name}} is {{value.dtype}}{{value.shape}}, but numbers of the shape {{shape}} are needed")
    numbers = value.reshape(*lead, int(np.prod(shape)))
    if not choices:
        return numbers.astype(np.float32)
    hot = [numbers[..., [i]] == low + np.arange(n) for i, (low, n) in enumerate(zip(start, choices))]
    if not all(one.any(axis=-1).all() for one in hot):
        ranges = [(low, low + n - 1) for low, n in zip(start, choices)]
        raise ValueError(f"{{name}} is {{value.tolist()}}, but whole numbers within {{ranges}} are needed")
    return np.concatenate(hot, axis=-1).astype(np.float32)


def check_keys(value, place):
    """A dict or tuple must hold the entries that are needed, and no others."""
    needed = dict.fromkeys(entry["path"][len(place)] for entry in ENTRIES if entry["path"][: len(place)] == place)
    given = value if isinstance(value, dict) else range(len(value)) if isinstance(value, (tuple, list)) else ()
    if set(given) != set(needed):
        name, kind = ".".join(map(str, ("observation", *place))), type(value).__name__
        raise ValueError(f"{{name}} is a {{kind}} with the entries {{list(given)}}, but {{list(needed)}} are needed")
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
    """The graph from `observation` `[batch, obs]` to `action` `[batch, act]`, the normaliser and the bounds in it. With
    a layout it has an input for each entry, `observation.NAME` `[batch, *shape]`, and actions have their own shape."""
    onnx: Any = _import_onnx()
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    graph, layout = _Graph(onnx), policy.layout
    if layout is None:
        inputs = [helper.make_tensor_value_info("observation", float32, ["batch", policy.obs_mean.size])]
        _add_network(graph, policy, "observation", "action")
    else:
        inputs = [_input(onnx, entry) for entry in layout.entries]
        _add_network(graph, policy, _add_layout(graph, layout), "flat_action")
        graph.constants["act_shape"] = np.array([-1, *layout.act_shape], np.int64)
        graph.add("Reshape", ["flat_action", "act_shape"], "action")
    act_shape = policy.action_low.shape if layout is None else layout.act_shape
    outputs = [helper.make_tensor_value_info("action", float32, ["batch", *act_shape])]
    constants = [onnx.numpy_helper.from_array(value, name) for name, value in graph.constants.items()]
    # old enough for runtimes of several years ago
    opset = helper.make_opsetid("", 17)
    whole = helper.make_graph(graph.nodes, "policy", inputs, outputs, constants)
    model = helper.make_model(whole, opset_imports=[opset], ir_version=8)
    if layout is not None:
        helper.set_model_props(model, {"doublehorizon.observation": json.dumps(layout.to_json())})
    onnx.checker.check_model(model)
    return model.SerializeToString()


@dataclass
class _Graph:
    """An ONNX graph while it is put together."""

    onnx: Any
    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, kind: str, inputs: list[str], output: str, **attributes: int) -> None:
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, [output], **attributes))


def _input_name(entry: ObsEntry) -> str:
    return ".".join(map(str, ("observation", *entry.path)))


def _input(onnx: Any, entry: ObsEntry) -> Any:
    number = onnx.TensorProto.INT64 if entry.choices else onnx.TensorProto.FLOAT
    return onnx.helper.make_tensor_value_info(_input_name(entry), number, ["batch", *entry.shape])


def _add_layout(graph: _Graph, layout: ObsLayout) -> str:
    """Adds what lays the inputs out as one vector; returns its name."""
    for i, entry in enumerate(layout.entries):
        numbers = f"numbers{i}" if entry.choices else f"part{i}"
        graph.add("Flatten", [_input_name(entry)], numbers, axis=1)
        if entry.choices:
            graph.constants[f"which{i}"], graph.constants[f"values{i}"] = entry.one_hot()
            graph.add("Gather", [numbers, f"which{i}"], f"chosen{i}", axis=1)
            graph.add("Equal", [f"chosen{i}", f"values{i}"], f"is_hot{i}")
            graph.add("Cast", [f"is_hot{i}"], f"part{i}", to=graph.onnx.TensorProto.FLOAT)
    graph.add("Concat", [f"part{i}" for i in range(len(layout.entries))], "flat", axis=1)
    return "flat"


def _add_network(graph: _Graph, policy: NumpyPolicy, observation: str, action: str) -> None:
    """Adds the network, from vectors to actions in the environment's own units."""
    graph.constants |= policy.arrays()
    low, high = graph.constants.pop("action_low"), graph.constants.pop("action_high")
    graph.constants |= {
        "action_center": 0.5 * (low + high),
        "action_reach": 0.5 * (high - low),
        "begin": np.array([0], np.int64),
        "end": np.array([low.size], np.int64),
        "last_axis": np.array([1], np.int64),
    }
    graph.add("Sub", [observation, "obs_mean"], "centered")
    graph.add("Div", ["centered", "obs_std"], "hidden0")
    num_layers = len(policy.weights)
    for i in range(num_layers):
        graph.add("Gemm", [f"hidden{i}", f"layer{i}.weight", f"layer{i}.bias"], f"linear{i}")
        if i < num_layers - 1:
            graph.add("Sigmoid", [f"linear{i}"], f"gate{i}")
            graph.add("Mul", [f"linear{i}", f"gate{i}"], f"hidden{i + 1}")
    graph.add("Slice", [f"linear{num_layers - 1}", "begin", "end", "last_axis"], "mean")
    graph.add("Tanh", ["mean"], "unit")
    graph.add("Mul", ["unit", "action_reach"], "scaled")
    graph.add("Add", ["scaled", "action_center"], action)


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
    if runner.exists() and not runner.read_text(errors="replace").startswith(RUNNER.split("{", 1)[0]):
        raise UserError(
            f"{runner}, which would run the policy, is there already, and not from export. Choose another name."
        )
    write_file(path, content.getvalue())
    write_file(runner, _runner(path.name, policy.layout).encode())
    return [path, runner]


def _runner(npz: str, layout: ObsLayout | None) -> str:
    if layout is None:
        return RUNNER.format(npz=npz, layout="", vector="np.asarray(observation, np.float32)", give="return")
    entries = "\n".join(f"    {asdict(entry)}," for entry in layout.entries)
    written = LAYOUT.format(entries=entries, act_shape=layout.act_shape)
    return RUNNER.format(npz=npz, layout=written, vector="flatten(observation)", give="action =") + SHAPED
