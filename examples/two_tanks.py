"""Level control of two tanks: named observations, large rewards, a penalty, and an end that the environment decides.

    python examples/two_tanks.py                                           # trains, two minutes on two CPU cores
    doublehorizon train two_tanks:make_env --preset quick --steps 3000     # the same, run in this folder

A pump fills the upper tank, the upper tank drains into the lower one, and the lower one into the sewer. The lower
level shall be what was asked for. A tank that overflows ends the episode with a fine. The environment is as an engineer
would write it: nothing in it was scaled or shaped for learning.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict

import doublehorizon as dh


class TwoTanks(gym.Env):
    """Observes both levels and the wanted one, in metres; the action is the pump's flow, in litres per second."""

    observation_space = Dict({"levels": Box(0.0, 2.0, (2,), np.float32), "wanted": Box(0.0, 2.0, (1,), np.float32)})
    action_space = Box(0.0, 10.0, (1,), np.float32)
    height, area, outlet, gravity, seconds_per_step, most_steps = 1.0, 0.05, 1.2e-3, 9.81, 2.0, 150

    def __init__(self, fine: float = 5000.0, scale: float = 1.0):
        self.fine, self.scale = fine, scale

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.levels = self.np_random.uniform(0.1, 0.5, 2)
        self.wanted, self.steps = self.np_random.uniform(0.3, 0.8), 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        self.steps += 1
        for _ in range(10):  # Torricelli's law, in ten small steps
            flows = self.outlet * np.sqrt(2.0 * self.gravity * np.maximum(self.levels, 0.0))
            inflows = np.array([float(action[0]) / 1000.0, flows[0]])
            self.levels = np.maximum(self.levels + (inflows - flows) / self.area * self.seconds_per_step / 10, 0.0)
        overflow = bool((self.levels > self.height).any())
        earned = 1000.0 * np.exp(-np.square((self.levels[1] - self.wanted) / 0.1))
        reward = self.scale * (-self.fine if overflow else float(earned))
        return self._observe(), reward, overflow, self.steps >= self.most_steps, {}

    def _observe(self) -> dict[str, np.ndarray]:
        return {"levels": self.levels.astype(np.float32), "wanted": np.array([self.wanted], np.float32)}


def make_env() -> gym.Env:
    return TwoTanks()


def main() -> None:
    model = dh.DHMBPO(make_env, config=dh.presets.quick)
    model.learn(3_000, progress_bar=True)
    env = make_env()
    obs, _ = env.reset(seed=7)
    total, over = 0.0, False
    while not over:
        action, _ = model.predict(obs)
        obs, reward, terminated, truncated, _ = env.step(action)
        total, over = total + float(reward), terminated or truncated
    print(
        f"a last episode: return {total:.0f} of at most 150,000; level {obs['levels'][1]:.3f} m, {obs['wanted']} asked"
    )


if __name__ == "__main__":
    main()
