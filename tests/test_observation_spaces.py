"""Observations with names or parts, from the space to `predict`, files, ONNX and NumPy: always in the same order."""

import itertools
import json
import pickle
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import onnxruntime
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector.utils import concatenate, create_empty_array
from safetensors import safe_open

import doublehorizon as dh
from doublehorizon.acting.policy import NumpyPolicy, load_policy
from doublehorizon.analysis.export import export_policy
from doublehorizon.cli import _status
from doublehorizon.envs.make import describe
from doublehorizon.envs.obs_layout import ObsEntry, ObsLayout
from doublehorizon.envs.spaces import layout
from doublehorizon.errors import UserError
from doublehorizon.run.checkpoint_reader import read_newest, restore
from doublehorizon.run.run_reader import read_run
from worlds import TINY

TANKS = spaces.Dict(levels=Box(0, 2, (2,)), wanted=Box(0, 2, (1,)))
SPACES = {
    "square": Box(-1, 1, (2, 3)),
    "scalar": Box(-1, 1, ()),
    "whole numbers": spaces.Dict(a=Box(-9, 9, (2,), np.int64), b=Box(-1, 1, (1,), np.float64)),
    "discrete": Discrete(4, start=-2),
    "multidiscrete": MultiDiscrete([3, 2, 4], start=[0, -1, 5]),
    "square multidiscrete": MultiDiscrete([[3, 2], [4, 5]]),
    "multibinary": MultiBinary((2, 2)),
    "tanks": TANKS,
    "unsorted": spaces.Dict(OrderedDict(wanted=Box(0, 2, (1,)), levels=Box(0, 2, (2,)))),
    "tuple": spaces.Tuple([Discrete(3), Box(-1, 1, (2, 1)), Box(-1, 1, ())]),
    "nested": spaces.Dict(
        arm=spaces.Dict(joints=Box(-1, 1, (2, 2)), grip=Discrete(2)),
        feet=spaces.Tuple([MultiBinary(2), spaces.Dict(mode=MultiDiscrete([2, 3], start=[1, 1]))]),
        yaw=Box(-1, 1, (1,)),
    ),
}
LIMITED = replace(TINY, termination="never", loop=replace(TINY.loop, time_limit=10))
ACTION = Box(np.array([1.0, -3.0], np.float32), np.array([5.0, -1.0], np.float32))


def random_policy(space: gym.Space, action: Box = ACTION) -> NumpyPolicy:
    """A policy in whose actions every number of the observation counts differently."""
    rng, size, act_size = np.random.default_rng(0), spaces.flatdim(space), int(np.prod(action.shape))
    numbers = lambda *shape: rng.normal(0.0, 0.4, shape).astype(np.float32)  # noqa: E731
    return NumpyPolicy(
        (numbers(size, 8), numbers(8, 2 * act_size)),
        (numbers(8), numbers(2 * act_size)),
        numbers(size),
        1.0 + np.abs(numbers(size)),
        action.low.ravel(),
        action.high.ravel(),
        layout(space, action),
    )


def samples(space: gym.Space, count: int = 5) -> list:
    space.seed(0)
    return [space.sample() for _ in range(count)]


def batched(space: gym.Space, observations: list):
    """As vectorised environments stack them."""
    return concatenate(space, observations, create_empty_array(space, len(observations)))


def leaves(observation, path=()) -> dict:
    """Entries by their dotted names."""
    if isinstance(observation, dict | tuple):
        keys = observation if isinstance(observation, dict) else range(len(observation))
        return {name: leaf for key in keys for name, leaf in leaves(observation[key], (*path, key)).items()}
    return {".".join(map(str, ("observation", *path))): observation}


every_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())


@every_space
def test_a_layout_is_gymnasiums_own(space):
    laid_out, seen = layout(space, ACTION), samples(space)
    flat = np.stack([np.asarray(spaces.flatten(space, one), np.float32) for one in seen])
    assert laid_out.size == flat.shape[1] and laid_out.act_shape == (2,)
    for one, expected in zip(seen, flat, strict=True):
        found = laid_out.flatten(one)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(laid_out.flatten(batched(space, seen)), flat)


def test_entries_have_gymnasiums_order_and_say_what_they_are():
    assert str(layout(TANKS, ACTION)) == "levels (2), wanted (1)"
    assert str(layout(SPACES["unsorted"], ACTION)) == "wanted (1), levels (2)"
    assert str(layout(SPACES["square"], ACTION)) == "(2, 3)"
    assert str(layout(SPACES["tuple"], ACTION)) == "0 (one number: 0 to 2), 1 (2, 1), 2 (one number)"
    assert [entry.name for entry in layout(SPACES["nested"], ACTION).entries] == [
        "arm.joints",
        "arm.grip",
        "feet.0",
        "feet.1.mode",
        "yaw",
    ]


def test_a_vector_needs_no_layout_and_some_spaces_have_none():
    assert layout(Box(-1, 1, (3,)), ACTION) is None
    square = Box(-1.0, 1.0, (2, 2))
    assert layout(Box(-1, 1, (3,)), square) == ObsLayout((ObsEntry((), (3,)),), (2, 2))
    for only_gymnasiums in (spaces.Text(3), spaces.Dict(), spaces.Dict({0: Box(-1, 1, (2,))})):
        assert layout(spaces.Dict(a=Box(-1, 1, (2,)), b=only_gymnasiums), ACTION) is None


@every_space
def test_a_layout_survives_as_json(space):
    laid_out = layout(space, ACTION)
    assert ObsLayout.from_json(json.loads(json.dumps(laid_out.to_json()))) == laid_out


@every_space
def test_predict_takes_observations_as_they_are(space):
    policy, seen = random_policy(space), samples(space)
    flat = np.stack([np.asarray(spaces.flatten(space, one), np.float32) for one in seen])
    expected = ACTION.low + (policy.act(flat) + 1.0) * 0.5 * (ACTION.high - ACTION.low)
    assert np.ptp(expected, axis=0).min() > 0.01
    actions, state = policy.predict(batched(space, seen), state="kept", episode_start=np.ones(5, bool))
    assert state == "kept"
    np.testing.assert_allclose(actions, expected, atol=1e-6)
    np.testing.assert_allclose([policy.predict(one)[0] for one in seen], expected, atol=1e-5)


def test_actions_have_the_shape_of_their_space():
    for act_shape, space in itertools.product([(), (1,), (2, 3)], [TANKS, Box(-1, 1, (4, 1))]):
        policy = random_policy(space, Box(-1.0, 1.0, act_shape))
        assert policy.predict(space.sample())[0].shape == act_shape
        assert policy.predict(batched(space, samples(space)))[0].shape == (5, *act_shape)
    noisy = [policy.predict(space.sample(), deterministic=False)[0] for _ in range(2)]
    assert noisy[0].shape == (2, 3) and not np.array_equal(*noisy)


LEVELS, WANTED = np.zeros(2, np.float32), np.zeros(1, np.float32)
REFUSED = {
    "a vector": (TANKS, np.zeros(3), ["array", "(3,)", "dict: levels (2), wanted (1)"]),
    "a list of numbers": (TANKS, [0.0, 0.0, 0.0], ["list of 3", "dict: levels (2), wanted (1)"]),
    "a key missing": (TANKS, {"levels": LEVELS}, ["no entry 'wanted'", "dict of levels,", "wanted (1)"]),
    "a key misspelt": (
        TANKS,
        {"level": LEVELS, "wanted": WANTED},
        ["no entry 'levels'", "level, wanted", "levels (2)"],
    ),
    "a key too many": (TANKS, {"levels": LEVELS, "wanted": WANTED, "flow": 1.0}, ["unknown entry 'flow'"]),
    "a wrong shape": (TANKS, {"levels": np.zeros(3), "wanted": WANTED}, ["levels", "(3,)", "(2,)"]),
    "too few axes": (TANKS, {"levels": LEVELS, "wanted": 1.0}, ["wanted", "()", "(1,)"]),
    "two batches": (TANKS, {"levels": np.zeros((4, 2)), "wanted": np.zeros((3, 1))}, ["wanted", "(3,)", "(4,)"]),
    "half a batch": (TANKS, {"levels": np.zeros((4, 2)), "wanted": WANTED}, ["wanted", "()", "(4,)"]),
    "nothing measured": (TANKS, {"levels": LEVELS, "wanted": [None]}, ["wanted", "list of 1", "numbers"]),
    "unequal rows": (TANKS, {"levels": [[1.0], [1.0, 2.0]], "wanted": WANTED}, ["levels", "list of 2", "numbers"]),
    "a dict for a tuple": (SPACES["tuple"], {"0": 1}, ["dict of 0", "needs a tuple"]),
    "too long a tuple": (SPACES["tuple"], (0, 1, 2, 3), ["tuple of 4", "unknown entry 3"]),
    "too short a tuple": (SPACES["tuple"], (0,), ["tuple of 1", "no entry 1"]),
    "an array for a tuple": (SPACES["tuple"], np.zeros(3), ["array", "needs a tuple"]),
    "a wrong value": (SPACES["discrete"], 2, ["[2]", "-2 to 1"]),
    "a fraction": (SPACES["discrete"], 0.5, ["[0.5]", "-2 to 1"]),
    "a wrong value in a batch": (SPACES["multidiscrete"], [[0, 0, 5], [0, 1, 6]], ["[0, 1, 6]", "-1 to 0, 5 to 8"]),
    "a flat box": (SPACES["square"], np.zeros(6), ["(6,)", "(2, 3)"]),
    "something nested": (
        SPACES["nested"],
        {"arm": {"joints": np.zeros((2, 2)), "grip": 1}, "feet": (np.zeros(2), [1, 1]), "yaw": [0.0]},
        ["observation's feet.1 is a list of 2", "dict"],
    ),
}
refused = pytest.mark.parametrize(("space", "seen", "words"), REFUSED.values(), ids=REFUSED.keys())


@refused
def test_what_does_not_fit_is_refused_in_one_line(space, seen, words):
    with pytest.raises(UserError) as problem:
        random_policy(space).predict(seen)
    said = str(problem.value)
    assert "\n" not in said and all(word in said for word in words), said


def test_a_policy_without_names_refuses_a_dict_in_one_line():
    with pytest.raises(UserError, match=r"is a dict, but this policy needs numbers \(\.\.\., 3\)"):
        random_policy(Box(-1, 1, (3,))).predict({"levels": LEVELS, "wanted": WANTED})


@every_space
def test_a_policy_file_keeps_the_layout(space, tmp_path):
    policy = random_policy(space, Box(-1.0, 1.0, (1, 2)))
    policy.save(tmp_path / "p.safetensors")
    loaded, seen = load_policy(tmp_path / "p.safetensors"), batched(space, samples(space))
    assert loaded.layout == policy.layout
    np.testing.assert_array_equal(loaded.predict(seen)[0], policy.predict(seen)[0])


def about(path: Path) -> str:
    with safe_open(path, framework="numpy") as file:
        return file.metadata()["format"]


def test_only_a_file_with_a_layout_has_the_new_format(tmp_path):
    random_policy(Box(-1, 1, (3,))).save(tmp_path / "vector.safetensors")
    assert about(tmp_path / "vector.safetensors").startswith("doublehorizon-policy-1:")
    assert about(tmp_path / "vector.safetensors").count(":") == 1
    random_policy(TANKS).save(tmp_path / "named.safetensors")
    kind, _, written = about(tmp_path / "named.safetensors").split(":", 2)
    assert kind == "doublehorizon-policy-2" and json.loads(written) == layout(TANKS, ACTION).to_json()


def test_a_layout_that_was_tampered_with_is_refused(tmp_path):
    path = tmp_path / "p.safetensors"
    random_policy(TANKS).save(path)
    whole = path.read_bytes()
    for old, new in ((b"levels", b"wanted"), (b"policy-2", b"policy-1"), (b"wanted", b"levels")):
        assert old in whole
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(UserError, match="is damaged"):
            load_policy(path)


def test_a_policy_whose_layout_is_of_another_size_is_refused(tmp_path):
    path = tmp_path / "p.safetensors"
    for wrong in (layout(SPACES["square"], ACTION), layout(TANKS, Box(-1.0, 1.0, (3,)))):
        replace(random_policy(TANKS), layout=wrong).save(path)
        with pytest.raises(UserError, match="entries do not fit"):
            load_policy(path)


def test_acting_on_named_observations_needs_neither_gymnasium_nor_jax(tmp_path):
    random_policy(TANKS).save(tmp_path / "p.safetensors")
    lines = (
        "import sys, doublehorizon as dh",
        "action, _ = dh.load_policy(sys.argv[1]).predict({'wanted': [0.5], 'levels': [0.1, 0.2]})",
        "print(action.shape, {'jax', 'gymnasium'} & {*sys.modules})",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), str(tmp_path / "p.safetensors")], capture_output=True, text=True
    )
    assert done.stdout.strip() == "(2,) set()", done.stderr


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


class Tanks(gym.Env):
    """As `examples/two_tanks.py`, without its physics: the reward is for closeness to what is wanted."""

    observation_space, action_space = TANKS, Box(0.0, 10.0, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.levels, self.wanted, self.steps = self.np_random.uniform(0, 1, 2), self.np_random.uniform(0, 1, 1), 0
        return self._observe(), {}

    def step(self, action):
        assert action.shape == (1,)
        self.levels = np.clip(self.levels + 0.02 * (action[0] - 5.0), 0, 2)
        self.steps += 1
        reward = -float(np.square(self.levels - self.wanted).sum())
        return self._observe(), reward, False, self.steps >= 10, {}

    def _observe(self):
        return {"levels": self.levels.astype(np.float32), "wanted": self.wanted.astype(np.float32)}


class TurnedTanks(Tanks):
    """The same numbers in another order."""

    observation_space = SPACES["unsorted"]


def test_what_is_known_of_an_environment_says_how_it_is_laid_out():
    spec = describe(Tanks(), TINY)
    assert spec.layout == layout(TANKS, Tanks.action_space)
    assert json.loads(json.dumps(spec.facts()))["layout"] == spec.layout.to_json()
    plain = describe(gym.make("Pendulum-v1"))
    assert plain.layout is None and plain.facts()["layout"] is None


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[dh.DHMBPO, Path]:
    folder = tmp_path_factory.mktemp("tanks") / "run"
    return dh.DHMBPO(Tanks, config=LIMITED).learn(40, out=folder), folder


def test_a_run_on_named_observations_is_used_by_their_names(trained):
    model, folder = trained
    seen = samples(TANKS)
    action, _ = dh.load_policy(folder).predict(seen[0])
    assert Tanks.action_space.contains(action)
    np.testing.assert_array_equal(model.predict(seen[0])[0], action)
    turned = {"wanted": seen[0]["wanted"], "levels": seen[0]["levels"]}
    np.testing.assert_array_equal(model.predict(turned)[0], action)
    many = batched(TANKS, seen)
    assert model.predict(many)[0].shape == (5, 1)
    np.testing.assert_array_equal(dh.load_policy(folder).predict(many)[0], model.predict(many)[0])
    for agent in (model, dh.load_policy(folder)):
        with pytest.raises(UserError, match=r"needs a dict: levels \(2\), wanted \(1\)"):
            agent.predict(np.zeros(3, np.float32))


def test_a_run_goes_on_with_its_entries_in_the_same_order(trained):
    model, folder = trained
    again = dh.DHMBPO.load(folder, env=Tanks)
    assert again.policies[0].layout == model.policies[0].layout
    with pytest.raises(UserError, match="was trained with layout"):
        dh.DHMBPO.load(folder, env=TurnedTanks)
    saved, turned = read_newest(folder)[0], describe(TurnedTanks(), LIMITED)
    before = replace(saved, env={name: fact for name, fact in saved.env.items() if name != "layout"})
    assert restore(before, turned)[0].policies[0].layout == turned.layout  # a run from before goes on


def test_a_run_is_tested_with_its_entries_in_the_same_order(trained):
    model, folder = trained
    found = read_run(folder)
    assert found.env["layout"] == model.spec.layout.to_json()
    found.simulator("test_observation_spaces:Tanks")
    with pytest.raises(UserError, match="was trained with layout"):
        found.simulator("test_observation_spaces:TurnedTanks")
    del found.env["layout"]  # as in a run from before
    found.simulator("test_observation_spaces:TurnedTanks")


class Spoken(Tanks):
    """It also says a word, which only Gymnasium can lay out."""

    observation_space = spaces.Dict(word=spaces.Text(2), **TANKS.spaces)
    action_space = Box(0.0, 10.0, (1, 1))

    def step(self, action):
        return super().step(action[0])

    def _observe(self):
        return super()._observe() | {"word": "ab"}


def test_an_agent_predicts_for_what_only_gymnasium_can_lay_out(monkeypatch):
    env, policy = Spoken(), random_policy(Spoken.observation_space, Spoken.action_space)
    obs, _ = env.reset(seed=0)
    monkeypatch.setattr(dh.DHMBPO, "_best", lambda self: policy)
    action, _ = dh.DHMBPO(Spoken, config=LIMITED).predict(obs)
    flat = np.asarray(spaces.flatten(Spoken.observation_space, obs), np.float32)
    assert policy.layout is None and action.shape == (1, 1)
    np.testing.assert_array_equal(action[0], policy.predict(flat)[0])


@pytest.mark.slow
def test_stable_baselines3_evaluates_on_named_observations(trained):
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import DummyVecEnv

    def episode(agent, seed: int) -> float:
        env, total, over = Tanks(), 0.0, False
        obs, _ = env.reset(seed=seed)
        while not over:
            obs, reward, _, over, _ = env.step(agent.predict(obs)[0])
            total += reward
        return total

    model, folder = trained
    for agent in (model, dh.load_policy(folder)):
        env = DummyVecEnv([Tanks] * 3)
        env.seed(5)
        returns, lengths = evaluate_policy(agent, env, n_eval_episodes=3, return_episode_rewards=True, warn=False)
        assert lengths == [10] * 3
        np.testing.assert_allclose(sorted(returns), sorted(episode(agent, seed) for seed in (5, 6, 7)), rtol=1e-4)
