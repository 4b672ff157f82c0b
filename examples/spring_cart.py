"""A cart on a spring that follows a target: every step costs, the rail's end costs a fine, and nothing is scaled.

    python examples/spring_cart.py                                           # trains, two minutes on two CPU cores
    doublehorizon train spring_cart:make_env --preset quick --steps 3000     # the same, run in this folder

A bad controller pays a few points in each step, and the fine for the rail's end is paid once: an agent that looks
further ahead than an episode lasts finds it cheaper to crash. The discount therefore follows the episode's length, also
where the environment cuts its episodes off by itself, as this one does.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict

import doublehorizon as dh


class SpringCart(gym.Env):
    """Observes position, velocity, target and wind; the action is a force, stronger to the left than to the right."""

    observation_space = Dict(
        {
            "position": Box(-2.0, 2.0, (1,), np.float32),
            "velocity": Box(-np.inf, np.inf, (1,), np.float32),
            "target": Box(-1.0, 1.0, (1,), np.float32),
            "wind": Box(-1.0, 1.0, (1,), np.float32),
        }
    )
    action_space = Box(-5.0, 3.0, (1,), np.float32)
    mass, stiffness, friction, rail, seconds_per_step, most_steps, fine = 1.0, 2.0, 0.2, 1.9, 0.05, 100, 200.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.position, self.velocity = self.np_random.uniform(-0.5, 0.5, 2)
        self.target, self.wind = self.np_random.uniform(-1.0, 1.0, 2)
        self.steps = 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        self.steps += 1
        force = float(action[0])
        for _ in range(5):
            pull = force - self.stiffness * self.position - self.friction * self.velocity + self.wind
            self.velocity += self.seconds_per_step / 5 * pull / self.mass
            self.position += self.seconds_per_step / 5 * self.velocity
        crashed = bool(abs(self.position) > self.rail)
        cost = 10.0 * (self.position - self.target) ** 2 + 0.01 * force**2
        return self._observe(), -float(cost) - self.fine * crashed, crashed, self.steps >= self.most_steps, {}

    def _observe(self) -> dict[str, np.ndarray]:
        values = (np.clip(self.position, -2.0, 2.0), self.velocity, self.target, self.wind)
        return {
            name: np.array([x], np.float32)
            for name, x in zip(("position", "velocity", "target", "wind"), values, strict=True)
        }


def make_env() -> gym.Env:
    return SpringCart()


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
    print(f"a last episode: return {total:.0f}; at {obs['position'][0]:.2f} m, {obs['target'][0]:.2f} asked")


if __name__ == "__main__":
    main()
