"""Acts with a trained policy. Needs NumPy, safetensors and the environment; JAX is never imported.

python examples/use_policy.py runs/quickstart
"""

import json
import sys
from pathlib import Path

import gymnasium as gym

import doublehorizon as dh
from doublehorizon.envs import paper


def main(run: Path) -> None:
    paper.register()  # so that the paper's ids are known too
    env = gym.make(json.loads((run / "config.json").read_text())["env"]["name"])
    policy = dh.load_policy(run)
    for episode in range(3):
        obs, _ = env.reset(seed=episode)
        total, done = 0.0, False
        while not done:
            action, _ = policy.predict(obs)
            obs, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            done = terminated or truncated
        print(f"episode {episode}: return {total:.1f}")
    assert "jax" not in sys.modules


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/use_policy.py RUN_FOLDER")
    main(Path(sys.argv[1]))
