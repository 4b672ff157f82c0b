"""Beside other people's software, used for real: Stable-Baselines3's evaluation, and a notebook."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import doublehorizon as dh
from worlds import TINY

CELL = """
import doublehorizon as dh
from worlds import TINY
dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY).learn(80, progress_bar=True).num_timesteps
"""


@pytest.mark.slow
def test_stable_baselines3_evaluates_an_agent_and_a_policy_file(tmp_path):
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    model = dh.DHMBPO("Pendulum-v1", config=TINY).learn(80, out=tmp_path / "run")

    def returns(policy) -> list[float]:
        found, lengths = evaluate_policy(
            policy, make_vec_env("Pendulum-v1", n_envs=2, seed=5), n_eval_episodes=4, return_episode_rewards=True
        )
        assert lengths == [200] * 4
        return found

    def episode(seed: int) -> float:
        env, total, over = gym.make("Pendulum-v1"), 0.0, False
        obs, _ = env.reset(seed=seed)
        while not over:
            obs, reward, _, over, _ = env.step(model.predict(obs)[0])
            total += float(reward)
        return total

    found = returns(model)
    np.testing.assert_allclose(sorted(found[:2]), sorted([episode(5), episode(6)]), rtol=1e-4)
    assert returns(dh.load_policy(tmp_path / "run")) == found
    mean, spread = evaluate_policy(model, gym.make("Pendulum-v1"), n_eval_episodes=2, warn=False)
    assert -2000 < mean < 0 <= spread


@pytest.mark.slow
@pytest.mark.parametrize("has_widgets", [True, False])
def test_a_notebook_shows_the_progress_view(has_widgets):
    import nbclient
    import nbformat

    cell = CELL if has_widgets else "import sys; sys.modules['ipywidgets'] = None" + CELL
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(Path(__file__).parent)}}
    ).execute()
    outputs = notebook.cells[0].outputs
    assert outputs[-1].data["text/plain"] == "80"
    shown = str(outputs[:-1])
    assert "Pendulum-v1: 3 observations" in shown and "Warning" not in shown, shown
    panel = str(notebook.metadata.get("widgets", ""))
    drawn = {True: ("80 of 80 steps", "seed 1", "test return"), False: ("step 80/80", "seeds: ")}[has_widgets]
    for words in drawn:
        assert words in (panel if has_widgets else shown), (panel, shown)
