"""Agents in folders and in single files."""

import zipfile

import numpy as np
import pytest

import doublehorizon as dh
from worlds import TINY


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents") / "run"
    return dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY).learn(60, out=folder), folder


def test_one_file_holds_all_that_a_folder_does(trained, tmp_path):
    """What goes on from the file is, to the last bit, what goes on from the folder."""
    model, _ = trained
    model.save(tmp_path / "new" / "agent.zip")
    model.save(tmp_path / "agent")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["agent.zip"]
    from_file, from_folder = (dh.DHMBPO.load(tmp_path / name) for name in ("new/agent.zip", "agent"))
    assert from_file.run_folder is None and from_folder.run_folder == tmp_path / "agent"
    assert from_file.num_timesteps == 60 and from_file.last_returns() == model.last_returns()
    for agent in (from_file, from_folder):
        agent.learn(20)
    obs = np.array([0.3, -0.2, 1.0])
    np.testing.assert_array_equal(from_file.predict(obs)[0], from_folder.predict(obs)[0])
    assert not np.array_equal(from_file.predict(obs)[0], model.predict(obs)[0])


def test_a_file_is_replaced_only_if_it_is_an_agent(trained, tmp_path):
    model, _ = trained
    path = tmp_path / "agent.zip"
    model.save(path)
    before = path.stat().st_mtime_ns
    model.save(path)
    assert path.stat().st_mtime_ns > before
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("holiday.jpg", b"sea")
    (tmp_path / "letter.zip").write_text("dear all")
    (tmp_path / "folder.zip").mkdir()
    for name, words in (("photos.zip", "no agent"), ("letter.zip", "cannot be read"), ("folder.zip", "no agent")):
        with pytest.raises(dh.UserError, match=words):
            model.save(tmp_path / name)
    assert (tmp_path / "letter.zip").read_text() == "dear all" and (tmp_path / "photos.zip").stat().st_size < 200


def test_what_is_no_agent_is_told(trained, tmp_path):
    model, run = trained
    with pytest.raises(dh.UserError, match=r"eval\.csv cannot be read as an agent"):
        dh.DHMBPO.load(run / "eval.csv")
    model.save(tmp_path / "agent.zip")
    whole = (tmp_path / "agent.zip").read_bytes()
    (tmp_path / "agent.zip").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(dh.UserError, match=r"agent\.zip cannot be read"):
        dh.DHMBPO.load(tmp_path / "agent.zip")


def test_a_seed_policy_of_another_environment_is_refused_at_once(trained):
    _, run = trained
    policy = run / "policy" / "seed0.safetensors"
    with pytest.raises(dh.UserError, match=r"takes 3 numbers .* gives 1 .* InvertedPendulum-v5 has 4 and 1"):
        dh.DHMBPO("InvertedPendulum-v5", config=TINY, seed_policy=policy)
    dh.DHMBPO("Pendulum-v1", config=TINY, seed_policy=policy)
