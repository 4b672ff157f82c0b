"""Observations with names or parts, from the space to `predict` and policy files: always in the same order."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box
from safetensors import safe_open

from doublehorizon.acting.policy import load_policy
from doublehorizon.envs.obs_layout import ObsEntry, ObsLayout
from doublehorizon.envs.spaces import layout
from doublehorizon.errors import UserError
from observation_spaces import (
    ACTION,
    LEVELS,
    SPACES,
    TANKS,
    WANTED,
    batched,
    every_space,
    random_policy,
    refused,
    samples,
)


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
