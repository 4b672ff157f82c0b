"""An environment of your own, and a policy for it: a drone that climbs to a height and holds it, in a room.

    python examples/custom_env.py                                          # trains, about a minute on two CPU cores
    doublehorizon train custom_env:make_env --preset quick --steps 3000    # the same, run in this folder

The drone falls under gravity, its motor pushes upwards only and with a lag, and it breaks at the floor and at the
ceiling. No rule for that is given: the model learns from experience which steps end an episode.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

import doublehorizon as dh


class Drone(gym.Env):
    """Observes height, speed and thrust; the action is the thrust that the motor should reach, in newtons."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float32)
    action_space = Box(0.0, 20.0, (1,), np.float32)  # any bounds: the policy's actions are scaled to them
    target, ceiling, mass, gravity, seconds_per_step = 2.0, 4.0, 1.0, 9.81, 0.05

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)  # seeds self.np_random, the only source of chance here
        self.height, self.speed, self.thrust = self.np_random.uniform(0.5, 1.5), 0.0, self.gravity * self.mass
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        wanted = float(action[0])
        self.thrust += 0.3 * (wanted - self.thrust)
        self.speed += (self.thrust / self.mass - self.gravity) * self.seconds_per_step
        self.height += self.speed * self.seconds_per_step
        crashed = not 0.0 < self.height < self.ceiling
        reward = float(np.exp(-np.square(self.height - self.target)))  # 1 at the target, less away from it
        return self._observe(), reward, crashed, False, {}  # the time limit is not the environment's business

    def _observe(self) -> np.ndarray:
        return np.array([self.height, self.speed, self.thrust], np.float32)


def make_env() -> gym.Env:
    return gym.wrappers.TimeLimit(Drone(), max_episode_steps=200)


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
    print(f"a last episode: return {total:.1f} of at most 200, height {obs[0]:.2f} m (target {Drone.target} m)")


if __name__ == "__main__":
    main()
