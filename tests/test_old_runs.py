"""Runs of version 0.1, from before its files were put into folders and its records renamed, go on.

`data/version-0.1` holds runs of 60 steps that its code made (two seeds, tiny networks), one with a termination model
and imagined steps, one with Adam's moments; and what its code logged when it went on with them to 100 steps.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import doublehorizon as dh
from doublehorizon.run.run_state import encode
from kept import without_times

OLD = Path(__file__).parent / "data" / "version-0.1"
RUNS = ["dhmbpo", "mbpo-learned", "sac"]


@pytest.fixture
def old(tmp_path):
    def copy(name: str) -> Path:
        return Path(shutil.copytree(OLD / name, tmp_path / name))

    return copy


@pytest.mark.parametrize("name", RUNS)
def test_every_array_of_an_old_checkpoint_is_found(name, old):
    model = dh.DHMBPO.load(old(name))
    _, ours = encode(model.progress.state)
    theirs = load_file(OLD / name / "checkpoints" / "60" / "state.safetensors")
    assert len(ours) == len(theirs) and model.num_timesteps == 60
    by_content = lambda arrays: sorted((x.shape, x.tobytes()) for x in arrays.values())  # noqa: E731
    assert by_content(ours) == by_content(theirs)
    assert ours["agent.actor_critic.log_temperature"].shape == (2,)


@pytest.mark.parametrize("name", RUNS)
def test_an_old_policy_is_read(name):
    policy = dh.load_policy(OLD / name)
    assert policy.predict(np.zeros(3))[0].shape == (1,)
    assert dh.load_policy(OLD / name / "policy" / "seed1.safetensors").act_size == 1


@pytest.mark.parametrize("name", ["dhmbpo", "sac", pytest.param("mbpo-learned", marks=pytest.mark.slow)])
def test_an_old_run_goes_on(name, old):
    folder = old(name)
    model = dh.DHMBPO.load(folder)
    same_machine = not model._notes
    model.resume(folder, 100)
    assert model.num_timesteps == 100
    assert json.loads((folder / "config.json").read_text())["config"]["policy"]["replay_start_share"] == 0.0
    rows = without_times(folder / "progress.csv")
    assert len(rows) == 1 + 2 * 4 and all(np.isfinite(model.policies[k].weights[0]).all() for k in range(2))
    if same_machine and name != "mbpo-learned":  # keys of the termination model are drawn in another way now
        for log in ("progress", "eval"):
            ours, theirs = without_times(folder / f"{log}.csv"), without_times(OLD / "gone-on" / f"{name}-{log}.csv")
            assert ours[0] == theirs[0]
            # numbers of the config are arguments of programs now, which rounds otherwise
            np.testing.assert_allclose(np.float64(ours[1:]), np.float64(theirs[1:]), rtol=1e-4)
