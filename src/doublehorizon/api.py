"""`DHMBPO`: the agent as an object with Stable-Baselines3's habits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from doublehorizon import checkpoints
from doublehorizon.cache import use_compilation_cache
from doublehorizon.config import Config, seed_iterations, steps_per_iteration
from doublehorizon.data import Source, load_transitions
from doublehorizon.devices import Devices, find_devices, forget_programs, using
from doublehorizon.envs.check import complaints
from doublehorizon.envs.make import EnvLike, EnvSpec, Simulator, describe, factory
from doublehorizon.envs.spaces import flat_observations
from doublehorizon.errors import UserError
from doublehorizon.logs import View
from doublehorizon.policy import NumpyPolicy, load_policy
from doublehorizon.progress import Knowledge, Progress, begin, capacity_for, extend
from doublehorizon.records import to_json
from doublehorizon.seats import Recipe, Seat
from doublehorizon.train import Callback, train
from doublehorizon.workers import Crew


class DHMBPO:
    """Double Horizon Model-Based Policy Optimization.

    Args:
        env: a Gymnasium id, a task of DMControl (`dmc/cheetah-run`), `module:function`, a function that makes an
            environment, or an environment (for one seed).
        seed: the first seed.
        seeds: how many seeds to train side by side: `seed`, `seed + 1`, ...
        config: the numbers of the algorithm; the paper's if None. `dh.presets` has others.
        device: "cpu", "gpu" or None for the best there is. Of several GPUs as many are used as share the seeds out
            evenly.
        termination_rule: your own, from next observations `[..., obs]` to flags `[...]`, of operators, array methods or
            jax.numpy. A method `is_terminal` of the environment does the same.
        reward: your own reward, from observations, actions (in the environment's units) and next observations, that the
            policy learns from instead of a learnt one.
        data: transitions to learn from before the first step: an `.npz` file, `minari:DATASET`, or arrays by name (obs,
            act, reward, next_obs, terminated). There are then no random steps.
        seed_policy: acts instead of chance before the first fit: a function from observation to action, an object with
            `predict`, or a policy file of this package.
        check: let Gymnasium's `check_env` look at an environment of your own first; it steps it a few times.
    """

    def __init__(  # noqa: PLR0913 (what a user may bring, each by its name)
        self,
        env: EnvLike,
        *,
        seed: int = 0,
        seeds: int = 1,
        config: Config | None = None,
        device: str | None = None,
        termination_rule: Callable[[Any], Any] | None = None,
        reward: Callable[[Any, Any, Any], Any] | None = None,
        data: Source | None = None,
        seed_policy: Any = None,
        check: bool = True,
    ):
        if seeds < 1:
            raise UserError(f"seeds is {seeds}, but at least one is needed.")
        if not 0 <= seed < 2**31 - seeds:
            raise UserError(f"seed is {seed}, but it must lie between 0 and {2**31 - seeds - 1}.")
        self._is_object = isinstance(env, gym.Env)
        self.config = config or Config()
        wanted = max(seeds, self.config.loop.num_envs)
        if self._is_object and wanted > 1:
            raise UserError(
                f"an environment object serves one seed, but {wanted} environments are needed. Pass an id or a "
                "function that makes one."
            )
        self.seeds = list(range(seed, seed + seeds))
        self._devices = find_devices(device, seeds)
        self._make_env = factory(env, self.config.loop)
        sample = self._make_env()
        self._spec = describe(sample, self.config, env if isinstance(env, str) else None, termination_rule)
        self._obs_space, self._act_shape = sample.observation_space, sample.action_space.shape or ()
        self._notes = complaints(sample, self._spec.name) if check and _is_users_own(sample) else []
        if not self._is_object:
            sample.close()
        prior = None if data is None else load_transitions(data, self._spec, self.config.fit.held_out_every)
        self._knowledge = Knowledge(reward, prior)
        self._seed_policy = load_policy(seed_policy) if isinstance(seed_policy, str | Path) else seed_policy
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
        if self._progress is None and self.config.loop.seed_iterations == 0 and self._knowledge.prior is None:
            raise UserError(
                "loop.seed_iterations is 0, but there must be something to learn from: give transitions (data), or ask "
                "for at least 1."
            )
        if self._progress is not None and not self._progress.whole:
            raise UserError("the last learn() was stopped inside an iteration. Load a saved agent, or start a new one.")
        use_compilation_cache()
        forget_programs()
        with using(self._devices):
            if self._progress is None:
                rows = capacity_for(self.config, self.spec, total_timesteps, self._knowledge.num_prior)
                self._progress = begin(self.config, self.spec, self.seeds, rows, self._devices, self._knowledge)
            folder = prepare_folder(Path(out), self) if out is not None else None
            iteration = self._progress.iteration_steps * self.spec.action_repeat
            total = self._progress.step + -(-total_timesteps // iteration) * iteration
            extend(self._progress, total)
            with (
                View(self.spec.name, total, quiet=not progress_bar) as view,
                Crew(self._recipe(), self.seeds, self.config.loop.num_envs, self._is_object) as crew,
            ):
                view.say(self._introduction(total))
                for note in self._notes:
                    view.warn(note)
                train(self._progress, crew, total, folder, view, callback)
        return self

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = True
    ) -> tuple[np.ndarray, Any]:
        """Actions of the seed with the best last test return, in the environment's own range and shape."""
        flat = flat_observations(self._obs_space, observation)
        action, state = self._best().predict(flat, state, episode_start, deterministic, self._rng)
        return action.reshape(*action.shape[:-1], *self._act_shape), state

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
    def spec(self) -> EnvSpec:
        """What is known of the environment; a termination rule that it contradicted is marked as learned."""
        return self._spec if self._progress is None else self._progress.spec

    @property
    def given(self) -> list[str]:
        """What was brought along beside environment and config: a run without it would be another."""
        brought = {"data": self._knowledge.prior, "reward": self._knowledge.reward, "seed_policy": self._seed_policy}
        return [name for name, value in brought.items() if value is not None]

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
        iterations = seed_iterations(self.config, self.spec.time_limit, self._knowledge.num_prior > 0)
        return iterations * steps_per_iteration(self.config, self.spec.time_limit) * self.spec.action_repeat

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
    def load(
        cls,
        path: str | Path,
        env: EnvLike | None = None,
        device: str | None = None,
        termination_rule: Callable[[Any], Any] | None = None,
        reward: Callable[[Any, Any, Any], Any] | None = None,
    ) -> "DHMBPO":
        """Reads what `save` wrote. `env` is needed where the agent was not trained on a registered id;
        `termination_rule` and `reward` where it was given such a function."""
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
            termination_rule=termination_rule,
            reward=reward,
            check=False,
        )
        with using(model._devices):
            model._progress = checkpoints.load(Path(path), model.spec, model._devices, model._knowledge)
        return model

    def _best(self) -> NumpyPolicy:
        returns = self.last_returns()
        ranked = max(range(len(self.seeds)), key=lambda k: returns.get(self.seeds[k], -np.inf))
        return self.policies[ranked]

    def _recipe(self) -> Recipe:
        began = 0 if self._progress is None else self._progress.iteration
        return Recipe(self._make_env, self.spec, began, self._seed_policy, self.config.loop.step_timeout)

    def _introduction(self, total: int) -> str:
        spec, steps = self.spec, steps_per_iteration(self.config, self.spec.time_limit)
        return (
            f"{spec.name}: {spec.obs_size} observations, {spec.act_size} actions; episodes end {_ends(spec)}; "
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
            "given": model.given,
            "config": to_json(model.config),
        }
        (folder / "config.json").write_text(json.dumps(about, indent=1) + "\n")
    except OSError as problem:
        raise UserError(f"{folder} cannot be written: {problem}.") from problem
    return folder


def _is_users_own(env: gym.Env) -> bool:
    """Whether it, or one of its wrappers, comes neither from Gymnasium nor from here."""
    layers: list[Any] = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    return any(type(layer).__module__.split(".")[0] not in ("gymnasium", "doublehorizon") for layer in layers)


def _ends(spec: EnvSpec) -> str:
    if spec.termination == "learned":
        return "as the model learns"
    return "never, but by the time limit" if spec.rule is None else "by a known rule (checked against every step)"


def _words(devices: Devices) -> str:
    count = f"{len(devices)} x " if len(devices) > 1 else ""
    return count + devices[0].device_kind
