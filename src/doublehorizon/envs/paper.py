"""The paper's five Gym tasks, exactly as its curves were made, as Gymnasium ids `paper/HalfCheetah` and so on.

They are close to Gymnasium's v4 tasks (same model files) but not the same: velocities are not clipped, Ant and
Humanoid observe positions and velocities only, the bonus for being healthy is not paid on the step that ends an
episode, Ant pays for contact forces, and Humanoid moves for free (the authors' weights 1.25 and 0.1 were overwritten
by their base class, so 1.0 and 0 made the curves). Contacts begin where they did in the curves' MuJoCo, 2.3.
"""

import functools
import re
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.envs.mujoco import MujocoEnv
from gymnasium.spaces import Box

from doublehorizon.envs.termination import Rule, hopper, never

_engine: Any = mujoco  # it has no types


class PaperTask(MujocoEnv):
    """Forward speed, less the control cost, plus a bonus while healthy."""

    metadata: dict[str, Any] = {"render_modes": ["human", "rgb_array", "depth_array"]}  # noqa: RUF012 (Gymnasium's)
    model_file: ClassVar[str]
    frame_skip_: ClassVar[int]
    first_position: ClassVar[int] = 1  # the observation leaves out what comes before: where the robot is
    control_cost: ClassVar[float]
    healthy_bonus: ClassVar[float] = 0.0
    is_terminal: ClassVar[Rule] = staticmethod(never)

    def __init__(self, **options: Any):
        super().__init__(self.model_file, self.frame_skip_, observation_space=None, **options)
        if _margins_add_up():
            self.model.geom_margin[:] /= 2.0  # in these models every geom has the same
        self.metadata = {**type(self).metadata, "render_fps": round(1.0 / self.dt)}
        size = self.data.qpos.size - self.first_position + self.data.qvel.size
        self.observation_space = Box(-np.inf, np.inf, (size,), np.float64)

    def step(self, action: np.ndarray):
        before = self._place()
        self.do_simulation(action, self.frame_skip)
        speed = (self._place() - before) / self.dt
        obs = self._observe()
        terminated = bool(type(self).is_terminal(obs))
        bonus = 0.0 if terminated else self.healthy_bonus
        reward = float(speed - self.control_cost * np.sum(np.square(action)) + bonus - self._extra_cost())
        if self.render_mode == "human":
            self.render()
        return obs, reward, terminated, False, {"x_velocity": float(speed)}

    def reset_model(self) -> np.ndarray:
        position, velocity = self._reset_noise()
        self.set_state(self.init_qpos + position, self.init_qvel + velocity)
        return self._observe()

    def _observe(self) -> np.ndarray:
        return np.concatenate([self.data.qpos[self.first_position :], self.data.qvel])

    def _place(self) -> float:
        return float(self.data.qpos[0])

    def _extra_cost(self) -> float:
        return 0.0

    def _reset_noise(self) -> tuple[np.ndarray, np.ndarray]:
        raise AssertionError("each task has its own reset noise")

    def _uniform(self, scale: float) -> tuple[np.ndarray, np.ndarray]:
        position = self.np_random.uniform(-scale, scale, self.model.nq)
        return position, self.np_random.uniform(-scale, scale, self.model.nv)

    def _uniform_and_normal(self, scale: float) -> tuple[np.ndarray, np.ndarray]:
        position = self.np_random.uniform(-scale, scale, self.model.nq)
        return position, scale * self.np_random.standard_normal(self.model.nv)


@functools.cache
def _margins_add_up() -> bool:
    """Whether two geoms touch within the sum of their margins, as in MuJoCo since 3.5, or within the larger one.
    That doubles the distance at which Hopper, Ant and Humanoid feel the ground."""
    sphere = '<geom size="1" margin="0.1"/>'
    apart = f'<body pos="0 0 2.15"><freejoint/>{sphere}</body>'
    model = _engine.MjModel.from_xml_string(f"<mujoco><worldbody>{sphere}{apart}</worldbody></mujoco>")
    data = _engine.MjData(model)
    _engine.mj_forward(model, data)
    return data.ncon > 0


class HalfCheetah(PaperTask):
    model_file, frame_skip_ = "half_cheetah.xml", 5
    control_cost = 0.1

    def _initialize_simulation(self) -> tuple[Any, Any]:
        """The file asks the compiler for a total mass. MuJoCo warns that this will go, and says what to do instead."""
        text = Path(self.fullpath).read_text()
        asked = re.search(r' settotalmass="([\d.]+)"', text)
        if asked is None:
            return super()._initialize_simulation()
        model = _engine.MjModel.from_xml_string(text.replace(asked.group(), ""))
        model.vis.global_.offwidth = max(model.vis.global_.offwidth, self.width)  # as Gymnasium does, for videos
        model.vis.global_.offheight = max(model.vis.global_.offheight, self.height)
        data, mass = _engine.MjData(model), float(asked.group(1))
        scale, compiled = mass / _engine.mj_getTotalmass(model), model.stat.meaninertia
        _engine.mj_setTotalmass(model, mass)
        _engine.mj_setConst(model, data)
        armature = float(np.mean(model.dof_armature))  # does not grow with the mass
        if model.stat.meaninertia == compiled:  # the solver uses it; MuJoCo 3.17 leaves it as it was compiled
            model.stat.meaninertia = scale * (compiled - armature) + armature
        return model, data

    def _reset_noise(self) -> tuple[np.ndarray, np.ndarray]:
        position, velocity = self._uniform_and_normal(0.1)
        position[0] = 0.0
        return position, velocity


class Hopper(PaperTask):
    model_file, frame_skip_ = "hopper.xml", 4
    control_cost, healthy_bonus = 1e-3, 1.0
    is_terminal = staticmethod(hopper)

    def _reset_noise(self) -> tuple[np.ndarray, np.ndarray]:
        return self._uniform(5e-3)


class Walker2d(PaperTask):
    model_file, frame_skip_ = "walker2d.xml", 4
    control_cost, healthy_bonus = 1e-3, 1.0

    @staticmethod
    def is_terminal(next_obs: Any) -> Any:
        height, angle = next_obs[..., 0], next_obs[..., 1]
        upright = (height > 0.8) & (height < 2.0) & (abs(angle) < 1.0)
        return ~(upright & (abs(next_obs[..., 1:]) < 100.0).all(axis=-1))

    def _reset_noise(self) -> tuple[np.ndarray, np.ndarray]:
        return self._uniform(5e-3)


class Ant(PaperTask):
    model_file, frame_skip_, first_position = "ant.xml", 5, 2
    control_cost, healthy_bonus = 0.5, 1.0

    @staticmethod
    def is_terminal(next_obs: Any) -> Any:
        height = next_obs[..., 0]
        finite = (abs(next_obs) < float("inf")).all(axis=-1)
        return ~((height > 0.2) & (height < 1.0) & finite)

    def _place(self) -> float:
        return float(self.data.body("torso").xpos[0])

    def _extra_cost(self) -> float:
        return 5e-4 * float(np.sum(np.square(np.clip(self.data.cfrc_ext, -1.0, 1.0))))

    def _reset_noise(self) -> tuple[np.ndarray, np.ndarray]:
        return self._uniform_and_normal(0.1)


class Humanoid(PaperTask):
    model_file, frame_skip_, first_position = "humanoid.xml", 5, 2
    control_cost, healthy_bonus = 0.0, 5.0

    @staticmethod
    def is_terminal(next_obs: Any) -> Any:
        height = next_obs[..., 0]
        return ~((height > 1.0) & (height < 2.0) & (abs(next_obs[..., 1:]) < 1000.0).all(axis=-1))

    def _place(self) -> float:
        mass = self.model.body_mass
        return float(mass @ self.data.xipos[:, 0] / mass.sum())

    def _reset_noise(self) -> tuple[np.ndarray, np.ndarray]:
        return self._uniform(1e-2)


TASKS = {task.__name__: task for task in (HalfCheetah, Hopper, Walker2d, Ant, Humanoid)}


def register() -> None:
    """Makes the five ids known to Gymnasium; calling it twice does no harm."""
    for name, task in TASKS.items():
        if f"paper/{name}" not in gym.registry:
            gym.register(f"paper/{name}", entry_point=task, max_episode_steps=1000)
