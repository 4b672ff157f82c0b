"""`DHMBPO`: the agent as an object with Stable-Baselines3's habits."""

import json
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from doublehorizon import checkpoints
from doublehorizon.cache import use_compilation_cache
from doublehorizon.config import Config, seed_iterations, steps_per_iteration, to_json
from doublehorizon.devices import Devices, find_devices, using
from doublehorizon.envs.make import EnvLike, Simulator, describe, factory
from doublehorizon.errors import UserError
from doublehorizon.logs import View
from doublehorizon.policy import NumpyPolicy
from doublehorizon.train import Callback, Progress, begin, extend, train
from doublehorizon.workers import Crew, Seat


class DHMBPO:
    """Double Horizon Model-Based Policy Optimization.

    Args:
        env: a Gymnasium id, a function that makes an environment, or an environment (for one seed).
        seed: the first seed.
        seeds: how many seeds to train side by side: `seed`, `seed + 1`, ...
        config: the numbers of the algorithm; the paper's if None. `dh.presets` has others.
        device: "cpu", "gpu" or None for the best there is. Of several GPUs as many are used as share the seeds out
            evenly.
    """

    def __init__(
        self,
        env: EnvLike,
        *,
        seed: int = 0,
        seeds: int = 1,
        config: Config | None = None,
        device: str | None = None,
    ):
        if seeds < 1:
            raise UserError(f"seeds is {seeds}, but at least one is needed.")
        if not 0 <= seed < 2**31 - seeds:
            raise UserError(f"seed is {seed}, but it must lie between 0 and {2**31 - seeds - 1}.")
        self._is_object = isinstance(env, gym.Env)
        if self._is_object and seeds > 1:
            raise UserError(
                f"an environment object serves one seed, but seeds is {seeds}. Pass an id or a function that makes one."
            )
        self.config = config or Config()
        self.seeds = list(range(seed, seed + seeds))
        self._devices = find_devices(device, seeds)
        loop = self.config.loop
        self._make_env = factory(env, loop.time_limit and loop.time_limit * loop.action_repeat)
        sample = self._make_env()
        self.spec = describe(sample, loop, registered=isinstance(env, str))
        if not self._is_object:
            sample.close()
        self._progress: Progress | None = None
        self._rng = np.random.default_rng(seed)

    def learn(
        self,
        total_timesteps: int,
        *,
        out: str | Path | None = None,
        callback: Callback | None = None,
        progress_bar: bool = False,
    ) -> "DHMBPO":
        """Trains for `total_timesteps` more simulator steps per seed, rounded up to whole iterations. Collection starts
        with a new episode.

        Args:
            total_timesteps: steps of each seed, random ones at the start included.
            out: a folder for `config.json`, `eval.csv`, `progress.csv` and the policies.
            callback: called after each iteration with the run's `Progress`; returning False stops.
            progress_bar: show how far it is.
        """
        if total_timesteps < 1:
            raise UserError(f"total_timesteps is {total_timesteps}, but at least 1 is needed.")
        if self._progress is not None and not self._progress.whole:
            raise UserError("the last learn() was stopped inside an iteration. Load a saved agent, or start a new one.")
        folder = prepare_folder(Path(out), self) if out is not None else None
        if self.spec.terminates is None and not progress_bar:
            warnings.warn(self._introduction(total_timesteps), stacklevel=2)
        use_compilation_cache()
        with using(self._devices):
            if self._progress is None:
                self._progress = begin(self.config, self.spec, self.seeds, total_timesteps, self._devices)
            iteration = self._progress.iteration_steps * self.spec.action_repeat
            total = self._progress.step + -(-total_timesteps // iteration) * iteration
            extend(self._progress, total)
            with (
                View(self.spec.name, total, quiet=not progress_bar) as view,
                Crew(self._make_env, self.spec, self.seeds, self._progress.iteration, self._is_object) as crew,
            ):
                view.say(self._introduction(total))
                train(self._progress, crew, total, folder, view, callback)
        return self

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = True
    ) -> tuple[np.ndarray, Any]:
        """Actions of the seed with the best last test return, in the environment's own range."""
        return self._best().predict(observation, state, episode_start, deterministic, self._rng)

    def evaluate(self, episodes: int = 10) -> float:
        """Mean return of so many test episodes with `predict`'s policy."""
        if episodes < 1:
            raise UserError(f"episodes is {episodes}, but at least 1 is needed.")
        simulator = Simulator(self._make_env(), self.spec)
        try:
            return Seat(simulator, self.seeds[0]).evaluate(self._best(), 0, episodes)
        finally:
            if not self._is_object:
                simulator.close()

    @property
    def policies(self) -> list[NumpyPolicy]:
        """Each seed's policy; they need NumPy only."""
        if self._progress is None or self._progress.policies is None:
            raise UserError(
                "nothing was learnt yet. Call learn(total_timesteps) with more than the random steps first."
            )
        return self._progress.policies

    @property
    def num_timesteps(self) -> int:
        """Simulator steps so far, per seed."""
        return 0 if self._progress is None else self._progress.step

    @property
    def random_timesteps(self) -> int:
        """Simulator steps with random actions, per seed, before anything is learnt."""
        limit = self.spec.time_limit
        return seed_iterations(self.config, limit) * steps_per_iteration(self.config, limit) * self.spec.action_repeat

    def last_returns(self) -> dict[int, float]:
        """The most recent test return of each seed."""
        return {} if self._progress is None else self._progress.last_returns()

    def save(self, path: str | Path) -> None:
        """Writes the agent, its replay included, to a folder from which `load` and further `learn` continue. An episode
        that was running is not continued: the next one starts afresh."""
        if self._progress is None or not self._progress.whole:
            raise UserError("there is nothing to save: call learn(total_timesteps) first, and let it end.")
        checkpoints.save(self._progress, Path(path))

    @classmethod
    def load(cls, path: str | Path, env: EnvLike | None = None, device: str | None = None) -> "DHMBPO":
        """Reads what `save` wrote. `env` is needed where the agent was not trained on a registered id."""
        config, about = checkpoints.read_about(Path(path))
        if env is None and not about["env"]["registered"]:
            raise UserError(
                f"{path} was not trained on a registered id: pass the environment too, load(path, env=...)."
            )
        seeds = about["seeds"]
        model = cls(
            about["env"]["name"] if env is None else env,
            seed=seeds[0],
            seeds=len(seeds),
            config=config,
            device=device,
        )
        with using(model._devices):
            model._progress = checkpoints.load(Path(path), model.spec, model._devices)
        return model

    def _best(self) -> NumpyPolicy:
        returns = self.last_returns()
        ranked = max(range(len(self.seeds)), key=lambda k: returns.get(self.seeds[k], -np.inf))
        return self.policies[ranked]

    def _introduction(self, total: int) -> str:
        spec, steps = self.spec, steps_per_iteration(self.config, self.spec.time_limit)
        if spec.terminates is None:
            ends = "no rule known, taken as never (checked against every step)"
        else:
            ends = "never, but by the time limit" if spec.never_ends else "by its known rule"
        return (
            f"{spec.name}: {spec.obs_size} observations, {spec.act_size} actions; episodes end {ends}; "
            f"{len(self.seeds)} seed(s) to {total} steps, {steps} per iteration, on {_words(self._devices)}"
        )


def prepare_folder(folder: Path, model: DHMBPO) -> Path:
    """A new run folder with its `config.json`; one that already holds a run is left alone."""
    if (folder / "config.json").exists() or (folder / "eval.csv").exists():
        raise UserError(f"{folder} already holds a run. Choose another folder, or remove it.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        about = {
            "env": model.spec.facts(),
            "seeds": model.seeds,
            "config": to_json(model.config),
        }
        (folder / "config.json").write_text(json.dumps(about, indent=1) + "\n")
    except OSError as problem:
        raise UserError(f"{folder} cannot be written: {problem}.") from problem
    return folder


def _words(devices: Devices) -> str:
    count = f"{len(devices)} x " if len(devices) > 1 else ""
    return count + devices[0].device_kind
