"""Transitions from files."""

import numpy as np
import pytest

from doublehorizon.acting.env_runner import EnvRunner
from doublehorizon.acting.recorded_data import load_transitions
from doublehorizon.envs.make import Simulator, describe, make
from doublehorizon.errors import UserError

SPEC = describe(make("Pendulum-v1"))


def recorded(num_steps: int) -> dict[str, np.ndarray]:
    """Random steps of Pendulum as a user would have logged them: actions in [-2, 2]."""
    batch = EnvRunner(Simulator(make("Pendulum-v1"), SPEC), seed=0).collect(0, None, num_steps).batch
    return batch | {"act": 2.0 * batch["act"]}


def test_a_file_gives_back_what_was_recorded(tmp_path):
    rows = recorded(203)
    np.savez(tmp_path / "log.npz", **rows)
    found = load_transitions(str(tmp_path / "log.npz"), SPEC, group_size=5)
    for name, value in found.items():
        expected = rows[name][:200] / (2.0 if name == "act" else 1.0)
        np.testing.assert_allclose(value, expected, atol=1e-6)
    others = dict(
        zip(("observations", "actions", "rewards", "next_observations", "terminals"), rows.values(), strict=True)
    )
    np.testing.assert_array_equal(load_transitions(others, SPEC, 5)["next_obs"], found["next_obs"])


def test_what_is_wrong_with_a_file_is_said(tmp_path):
    rows = recorded(100)
    (tmp_path / "text.npz").write_text("no numbers")
    (tmp_path / "empty.npz").touch()
    for source, words in (
        (tmp_path / "none.npz", "cannot be read"),
        (tmp_path / "text.npz", "cannot be read"),
        ({k: v for k, v in rows.items() if k != "next_obs"}, "no array next_obs or next_observations.*it has act"),
        (rows | {"obs": rows["obs"][:, :2]}, r"obs of the shape \(100, 2\).*needs \(100, 3\)"),
        (rows | {"obs": rows["obs"].T}, r"obs of the shape \(3, 100\)"),
        (rows | {"terminated": rows["terminated"] + 255}, "other than 0 and 1"),
        (tmp_path / "empty.npz", "cannot be read"),
        ({k: v[:50] for k, v in rows.items()}, "50 transitions, but at least 100"),
        (rows | {"act": 3.0 * rows["act"]}, "beyond the bounds"),
        (rows | {"reward": np.where(np.arange(100) == 7, np.nan, rows["reward"])}, "reward.*row 7"),
    ):
        with pytest.raises(UserError, match=words) as problem:
            load_transitions(source, SPEC, 5)
        assert "\n" not in str(problem.value)


@pytest.mark.slow
def test_a_minari_dataset_is_read(tmp_path, monkeypatch):
    import minari

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    rows = recorded(400)
    episodes = [
        minari.data_collector.EpisodeBuffer(
            id=i,
            observations=np.concatenate([rows["obs"][part], rows["next_obs"][part][-1:]]),
            actions=rows["act"][part],
            rewards=rows["reward"][part],
            terminations=np.zeros(200, bool),
            truncations=np.arange(200) == 199,
        )
        for i, part in enumerate((slice(0, 200), slice(200, 400)))
    ]
    minari.create_dataset_from_buffers(
        "pendulum/test-v0",
        episodes,
        env="Pendulum-v1",
        eval_env="Pendulum-v1",
        algorithm_name="random",
        code_permalink="https://example.org",
        author="nobody",
        author_email="nobody@example.org",
        description="random steps",
    )
    found = load_transitions("minari:pendulum/test-v0", SPEC, 5)
    for name, value in load_transitions(rows, SPEC, 5).items():
        np.testing.assert_allclose(found[name], value, atol=1e-6)
    with pytest.raises(UserError, match="no Minari dataset"):
        load_transitions("minari:pendulum/other-v0", SPEC, 5)
