"""Exported policies of named observations: ONNX inputs, and lines that need NumPy alone."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import onnxruntime
import pytest
from gymnasium.spaces import Box

from doublehorizon.acting.policy import NumpyPolicy
from doublehorizon.analysis.export import export_policy
from doublehorizon.cli import _status
from doublehorizon.envs.obs_layout import ObsLayout
from doublehorizon.errors import UserError
from observation_spaces import REFUSED, SPACES, TANKS, batched, every_space, leaves, random_policy, refused, samples


@every_space
def test_onnx_has_an_input_for_each_entry(space, tmp_path):
    policy = random_policy(space, Box(-1.0, 1.0, (1, 2)))
    (path,) = export_policy(policy, tmp_path / "p.onnx")
    session, seen = onnxruntime.InferenceSession(path), batched(space, samples(space))
    kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
    fed = leaves(seen)
    shapes = {one.name: one.shape for one in session.get_inputs()}
    assert shapes == {name: ["batch", *leaf.shape[1:]] for name, leaf in fed.items()}
    assert session.get_outputs()[0].shape == ["batch", 1, 2]
    arrays = {one.name: np.asarray(fed[one.name], kinds[one.type]) for one in session.get_inputs()}
    (actions,) = session.run(["action"], arrays)
    np.testing.assert_allclose(actions, policy.predict(seen)[0], atol=1e-5)
    written = session.get_modelmeta().custom_metadata_map["doublehorizon.observation"]
    assert ObsLayout.from_json(json.loads(written)) == policy.layout


def test_onnx_inputs_are_named_in_order_and_discrete_ones_are_whole_numbers(tmp_path):
    def inputs(space: gym.Space) -> list[tuple[str, str]]:
        (path,) = export_policy(random_policy(space), tmp_path / "p.onnx")
        return [(one.name, one.type) for one in onnxruntime.InferenceSession(path).get_inputs()]

    floats, whole = "tensor(float)", "tensor(int64)"
    assert inputs(TANKS) == [("observation.levels", floats), ("observation.wanted", floats)]
    assert inputs(SPACES["tuple"]) == [("observation.0", whole), ("observation.1", floats), ("observation.2", floats)]
    assert inputs(SPACES["discrete"]) == [("observation", whole)]
    assert inputs(Box(-1, 1, (3,))) == [("observation", floats)]


RUN = """
import pickle, sys
sys.path.insert(0, sys.argv[1])
from p import Policy
policy, (fits, misfit) = Policy(sys.argv[1] + "/p.npz"), pickle.load(open(sys.argv[1] + "/seen.pickle", "rb"))
actions = [policy(seen) for seen in fits]
try:
    policy(misfit)
    said = "nothing"
except ValueError as problem:
    said = str(problem)
pickle.dump((actions, said, "doublehorizon" in sys.modules), open(sys.argv[1] + "/actions.pickle", "wb"))
"""


def run_elsewhere(policy: NumpyPolicy, fits: list, misfit, folder: Path) -> tuple[list[np.ndarray], str]:
    """What the exported lines, alone in a process, do with observations, and what they say to one that is wrong."""
    export_policy(policy, folder / "p.npz")
    (folder / "seen.pickle").write_bytes(pickle.dumps((fits, misfit)))
    subprocess.run([sys.executable, "-I", "-c", RUN, str(folder)], check=True)
    actions, said, has_package = pickle.loads((folder / "actions.pickle").read_bytes())
    assert not has_package
    return actions, said


@pytest.mark.parametrize(
    ("name", "act_shape"),
    [("tanks", (1,)), ("nested", (1, 2)), ("tuple", ()), ("multidiscrete", (2,)), ("square", (2, 1))],
)
def test_the_exported_lines_act_as_predict_does(name, act_shape, tmp_path):
    space = SPACES[name]
    policy, seen = random_policy(space, Box(-1.0, 1.0, act_shape)), samples(space)
    fits = [*seen, batched(space, seen)]
    misfit = next(wrong for of, wrong, _ in reversed(REFUSED.values()) if of is space)
    actions, said = run_elsewhere(policy, fits, misfit, tmp_path)
    for one, action in zip(fits, actions, strict=True):
        assert action.shape == policy.predict(one)[0].shape
        np.testing.assert_allclose(action, policy.predict(one)[0], atol=1e-6)
    assert said != "nothing" and "\n" not in said
    assert len((tmp_path / "p.py").read_text().splitlines()) <= 80


@refused
def test_the_exported_lines_refuse_what_predict_refuses(space, seen, words, tmp_path):
    del words
    _, runner = export_policy(random_policy(space), tmp_path / "p.npz")
    names: dict = {}
    exec(runner.read_text(), names)
    with pytest.raises(ValueError, match=r"needed|inhomogeneous"):
        names["Policy"](tmp_path / "p.npz")(seen)


def test_the_exported_lines_name_the_entries_in_order(tmp_path):
    export_policy(random_policy(SPACES["unsorted"]), tmp_path / "p.npz")
    names: dict = {}
    exec((tmp_path / "p.py").read_text(), names)
    assert [(entry["path"], entry["shape"]) for entry in names["ENTRIES"]] == [(("wanted",), (1,)), (("levels",), (2,))]


def test_export_replaces_its_own_lines_and_nobody_elses(tmp_path):
    policy = random_policy(SPACES["unsorted"])
    for _ in range(2):
        export_policy(policy, tmp_path / "p.npz")
    (tmp_path / "controller.py").write_text("print('mine')\n")
    with pytest.raises(UserError, match=r"controller\.py.* not from export"):
        export_policy(policy, tmp_path / "controller.npz")
    assert (tmp_path / "controller.py").read_text() == "print('mine')\n"
    assert not (tmp_path / "controller.npz").exists()


def test_export_prints_the_inputs(tmp_path, capsys):
    random_policy(TANKS).save(tmp_path / "named.safetensors")
    random_policy(Box(-1, 1, (3,))).save(tmp_path / "vector.safetensors")
    for name, lines in (("named", ["observation: levels (2), wanted (1)"]), ("vector", [])):
        assert _status(["export", str(tmp_path / f"{name}.safetensors"), str(tmp_path / "p.onnx")]) == 0
        assert capsys.readouterr().out.splitlines() == [str(tmp_path / "p.onnx"), *lines]
