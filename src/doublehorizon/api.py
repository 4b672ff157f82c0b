"""`DHMBPO`: the agent as an object with Stable-Baselines3's habits."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from doublehorizon.acting.env_runner import EnvRunner, RunnerGroup, WorkerSpec
from doublehorizon.acting.exploration import exploration, first_actions
from doublehorizon.acting.policy import NumpyPolicy, load_policy
from doublehorizon.acting.recorded_data import Source, load_transitions
from doublehorizon.acting.workers import WorkerPool
from doublehorizon.algorithm.devices import find_devices, forget_programs, use_compilation_cache, using
from doublehorizon.config import Config
from doublehorizon.config_json import changed
from doublehorizon.envs.env_source import inspect_env
from doublehorizon.envs.make import EnvLike, EnvSpec, Simulator, can_pause
from doublehorizon.envs.spaces import flat_observation
from doublehorizon.errors import UserError
from doublehorizon.jax_settings import DETERMINISTIC_FLAG, asked_for_determinism
from doublehorizon.run import run_folder
from doublehorizon.run.checkpoint_reader import read_newest, read_step, restore
from doublehorizon.run.prior_knowledge import PriorKnowledge, require_fit
from doublehorizon.run.progress import Progress, begin, capacity_for, extend
from doublehorizon.run.replay_files import Archived
from doublehorizon.run.resources import Needs, needs, require_room
from doublehorizon.run.saved_agent import folder_of, write_agent
from doublehorizon.run.trackers import Tracker, as_trackers
from doublehorizon.sb3_words import as_config, explains_keywords, require_whole
from doublehorizon.schedule import evaluated_iterations, random_steps, steps_per_iteration
from doublehorizon.signals import Stopped, stoppable
from doublehorizon.training.callbacks import CallbackLike, as_callback
from doublehorizon.training.live_view import View, introduction, single_env_note
from doublehorizon.training.train import train

_FEW_STARTS = 3  # from one checkpoint


class DHMBPO:
    """Double Horizon Model-Based Policy Optimization.

    Args:
        env: a Gymnasium id, a task of DMControl (`dmc/cheetah-run`), `module:function`, a function that makes an
            environment, or an environment (for one seed).
        seed: the first seed.
        seeds: how many seeds to train side by side: `seed`, `seed + 1`, ...
        config: the numbers of the algorithm, a name of `dh.presets`, or a file such as a run's `config.json`.
        device: "cpu", "gpu" or None for the best there is. Of several GPUs as many are used as share the seeds out
            evenly.
        termination_rule: your own, from next observations `[..., obs]` to flags `[...]`, of operators, array methods or
            jax.numpy. A method `is_terminal` of the environment does the same.
        reward: your own reward, from observations, actions (in the environment's units) and next observations, that the
            policy learns from instead of a learnt one.
        data: transitions to learn from before the first step: an `.npz` file, `minari:DATASET`, or arrays by name (obs,
            act, reward, next_obs, terminated). There are then no random steps.
        seed_policy: acts before the first fit instead of uniform random actions: a function from observation to action,
            an object with `predict`, or a policy file of this package.
        check: let Gymnasium's `check_env` look at an environment of your own first; it steps it a few times. None, the
            default: yes, except for an environment object or `loop.single_env`, which may be real hardware.
    """

    @explains_keywords
    def __init__(  # noqa: PLR0913 (what a user may bring, each by its name)
        self,
        env: EnvLike,
        *,
        seed: int = 0,
        seeds: int = 1,
        config: Config | str | Path | None = None,
        device: str | None = None,
        termination_rule: Callable[[Any], Any] | None = None,
        reward: Callable[[Any, Any, Any], Any] | None = None,
        data: Source | None = None,
        seed_policy: Any = None,
        check: bool | None = None,
    ):
        require_whole(seed=seed, seeds=seeds)
        if seeds < 1:
            raise UserError(f"seeds is {seeds}, but at least one is needed.")
        if not 0 <= seed < 2**31 - seeds:
            raise UserError(f"seed is {seed}, but it must lie between 0 and {2**31 - seeds - 1}.")
        self.config = as_config(config)
        self.seeds = list(range(seed, seed + seeds))
        self.devices = find_devices(device, seeds)
        self.env_source = inspect_env(env, self.config, seeds, termination_rule, check)
        self._notes = self.env_source.notes
        prior = None if data is None else load_transitions(data, self.env_source.spec, self.config.fit.held_out_every)
        seed_policy = load_policy(seed_policy) if isinstance(seed_policy, str | Path) else seed_policy
        require_fit(seed_policy, self.env_source.spec)
        self._knowledge = PriorKnowledge(reward, prior, seed_policy)
        self._progress: Progress | None = None
        self._folder: Path | None = None
        self._runners: RunnerGroup | None = None  # of an environment object, whose episode goes on from call to call
        self._rng = np.random.default_rng(seed)

    @explains_keywords
    def learn(
        self,
        total_timesteps: int,
        *,
        out: str | Path | None = None,
        callback: CallbackLike = None,
        progress_bar: bool = False,
        trackers: Sequence[Tracker] = (),
    ) -> "DHMBPO":
        """Trains for `total_timesteps` more simulator steps per seed, rounded up to whole iterations.

        Args:
            total_timesteps: steps of each seed, random ones at the start included.
            out: a folder for `config.json`, `eval.csv`, `progress.csv`, the policies and checkpoints; a new one, or
                that in which this agent, or the one it was loaded from, has been learning.
            callback: a `dh.Callback`, or a function that is called after each iteration with the run's `Progress`;
                returning False stops. Several as a list; `dh.callbacks` has ready ones.
            progress_bar: show how far it is, on a terminal or in a notebook.
            trackers: other places for its figures, such as `dh.trackers.TensorBoard(folder)`; they stay open.
        """
        require_whole(total_timesteps=total_timesteps)
        if total_timesteps < 1:
            raise UserError(f"total_timesteps is {total_timesteps}, but at least 1 is needed.")
        self._learn_to(self.num_timesteps + self._rounded(total_timesteps), out, callback, progress_bar, trackers)
        return self

    def resume(
        self,
        run: str | Path,
        steps: int | None = None,
        *,
        callback: CallbackLike = None,
        progress_bar: bool = False,
        trackers: Sequence[Tracker] = (),
    ) -> "DHMBPO":
        """Goes on in the run folder from which this agent was loaded, to as many simulator steps per seed in all as the
        run was started for, or to `steps`, rounded up to whole iterations."""
        if self._progress is None or self._folder != Path(run).resolve():
            raise UserError(f"this agent is not from {run}: DHMBPO.load({str(run)!r}, env=...).resume({str(run)!r}).")
        goal = self._progress.goal if steps is None else self._rounded(steps)
        if goal < self.num_timesteps:
            raise UserError(f"the run stands at step {self.num_timesteps} already, but steps is {steps}: give more.")
        self._learn_to(goal, run, callback, progress_bar, trackers)
        return self

    def _learn_to(
        self, goal: int, out: str | Path | None, callback: CallbackLike, progress_bar: bool, trackers: Sequence[Tracker]
    ) -> None:
        """Trains until `goal` simulator steps per seed are done in all. Ctrl-C ends it with one line."""
        try:
            self._train(goal, out, callback, progress_bar, trackers)
        except Stopped as stopped:
            how = "Call learn() again to continue; nothing that was learnt is lost."
            if self._progress is not None and not self._progress.machinery.whole:
                how = "Load a saved agent to continue."
            if out is not None:
                how = f"Continue with: doublehorizon resume {shlex.quote(str(out))}"
                if not self.spec.registered:
                    how = f"Continue with: dh.DHMBPO.load({str(out)!r}, env=...).resume({str(out)!r})"
            raise stopped.with_advice(f"{self.spec.name} is at step {self.num_timesteps}. {how}") from None

    def _train(
        self, goal: int, out: str | Path | None, callback: CallbackLike, progress_bar: bool, trackers: Sequence[Tracker]
    ) -> None:
        called, trackers = as_callback(callback), as_trackers(trackers)
        self._check_readiness()
        use_compilation_cache()
        forget_programs()
        with ExitStack() as stack:
            stack.enter_context(stoppable())
            stack.enter_context(using(self.devices))
            room = self._checked_room(goal, None if out is None else Path(out))
            folder = None if out is None else stack.enter_context(self._settled(Path(out)))
            progress = self._begun(goal)
            called.on_start(progress)
            if folder is not None:
                run_folder.write_config(folder, progress)
            view = stack.enter_context(View(self.spec.name, goal, quiet=not progress_bar))
            if self.env_source.is_single and self._runners is None:
                self._runners = RunnerGroup(self.worker_spec())
            state, tests = progress.state, self.evaluation_episodes
            envs = (self.seeds, self.config.loop.num_envs, self._runners, state.episodes, state.ahead, tests)
            pool = stack.enter_context(WorkerPool(self.worker_spec(), *envs))
            view.say(introduction(self.spec, len(self.seeds), progress.setup.iteration_steps, goal, self.devices))
            view.say(f"{self.spec.name}: this run may use {room}")
            starts = 0
            if folder is not None and self.num_timesteps < goal:
                starts = run_folder.count_starts(folder, self.num_timesteps)
            if starts > _FEW_STARTS:
                view.warn(
                    f"{folder} was started {starts} times at step {self.num_timesteps} and got no further. Progress is "
                    "saved per iteration: let a process live for its start-up and one iteration. The first that learns "
                    "takes longest"
                )
            if self.env_source.is_single:
                view.say(self._single_env_note(progress))
            for note in self._notes:
                view.warn(note)
            self._notes = []
            train(progress, pool, folder, view, called, trackers)

    def _single_env_note(self, progress: Progress) -> str:
        """What the user should know whose environment may be a machine."""
        episodes, setup = self.evaluation_episodes, progress.setup
        last = -(-progress.goal // (setup.iteration_steps * self.spec.action_repeat))
        tests = evaluated_iterations(self.config, self.spec.time_limit, setup.first_fit, last)
        count = sum(iteration >= progress.iteration for iteration in tests)
        steps = count * episodes * self.spec.time_limit * self.spec.action_repeat
        return single_env_note(self.spec.name, can_pause(self.env_source.make()), episodes, steps)

    def _rounded(self, steps: int) -> int:
        """Simulator steps of the whole iterations that `steps` steps need."""
        size = steps_per_iteration(self.config, self.spec.time_limit) * self.spec.action_repeat
        return -(-int(steps) // size) * size

    @contextmanager
    def _settled(self, folder: Path) -> Iterator[Path]:
        """The run folder, for this process alone: a new one, or the one in which this agent has been learning."""
        goes_on = self._folder == folder.resolve()
        with run_folder.open_for_writing(folder, self.num_timesteps if goes_on else None):
            if not goes_on and self._progress is not None:  # what was learnt elsewhere is not in this folder
                self._progress.update(log_sizes={})
                self._progress.machinery.archived = Archived()
            self._folder = folder.resolve()
            yield folder

    def _check_readiness(self) -> None:
        if self._progress is None and self.random_timesteps == 0 and self._knowledge.data is None:
            raise UserError(
                "there are no random steps (loop.seed_iterations or loop.seed_episodes is 0), but there must be "
                "something to learn from: give transitions (data), or ask for at least 1."
            )
        if self._progress is not None and not self._progress.machinery.whole:
            raise UserError("the last learn() was stopped inside an iteration. Load a saved agent, or start a new one.")
        if "seed_policy" in self.given and self._knowledge.seed_policy is None and self._needs_seed_policy:
            raise UserError("this run began with a seed_policy, which it still needs: pass it again.")
        if self.config.deterministic and self.devices[0].platform == "gpu" and not asked_for_determinism():
            raise UserError(
                "deterministic needs an option that is set before JAX starts: use the command's --deterministic, or "
                f"set XLA_FLAGS={DETERMINISTIC_FLAG!r} in the environment."
            )

    @property
    def _needs_seed_policy(self) -> bool:
        """Whether nothing was learnt yet, or a test from then is still to be done."""
        if self._progress is None or self._progress.policies is None:
            return True
        return any(test.policies is None for test in self._progress.state.pending.values())

    def _checked_room(self, goal: int, folder: Path | None) -> Needs:
        """What a run to `goal` needs; a `UserError` if there is no room for it."""
        prior = self._knowledge.num_rows if self._progress is None else self._progress.setup.prior_rows
        found = needs(self.config, self.spec, len(self.seeds), goal, prior)
        used = 0 if self._progress is None else self._progress.capacity * found.row
        require_room(found, self.devices, folder, used)
        return found

    def _begun(self, goal: int) -> Progress:
        if self._progress is None:
            rows = capacity_for(self.config, self.spec, goal, self._knowledge.num_rows)
            self._progress = begin(self.config, self.spec, self.seeds, rows, self.devices, self._knowledge)
        extend(self._progress, goal)
        self._progress.update(goal=goal)
        return self._progress

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = True
    ) -> tuple[np.ndarray, Any]:
        """Actions of the seed with the best last test return, in the environment's own range and shape."""
        policy = self._best()
        if policy.layout is not None or isinstance(self.env_source.obs_space, gym.spaces.Box):
            return policy.predict(observation, state, episode_start, deterministic, self._rng)
        flat = flat_observation(self.env_source.obs_space, observation)  # only Gymnasium can lay it out
        action, state = policy.predict(flat, state, episode_start, deterministic, self._rng)
        return action.reshape(self.env_source.act_shape), state

    @explains_keywords
    def evaluate(self, episodes: int = 10) -> float:
        """Mean return of `episodes` test episodes with `predict`'s policy."""
        if episodes < 1:
            raise UserError(f"episodes is {episodes}, but at least 1 is needed.")
        policy = self._best()
        if self._runners is not None:  # the episode of a single environment ends here
            self._runners.release()
        self._runners = None
        simulator = Simulator(self.env_source.make(), self.spec)
        try:
            return EnvRunner(simulator, self.seeds[0]).evaluate(0, policy, episodes)
        finally:
            if not self.env_source.is_single:
                simulator.close()

    def get_env(self) -> gym.Env:
        """The environment that was given, or the only one that was made (`loop.single_env`). Otherwise a new one, for
        the caller to close."""
        return self.env_source.make()

    def set_env(self, env: EnvLike) -> None:
        """From now on it learns in, and is tested on, another environment with the same spaces: a simulator with other
        masses, say. What was learnt is kept; episodes begin anew."""
        found = inspect_env(env, self.config, len(self.seeds), check=False)
        assumed = [] if self._progress is None else self._progress.move_to(found.spec)
        self.env_source, self._notes, self._runners = found, assumed + found.notes, None

    def __repr__(self) -> str:
        tests = {seed: round(value, 1) for seed, value in self.last_returns().items()} or "none yet"
        return f"DHMBPO({self.spec.name!r}, seeds {self.seeds}, {self.num_timesteps} steps, last test returns {tests})"

    @property
    def spec(self) -> EnvSpec:
        """What is known of the environment; a termination rule that it contradicted is marked as learned."""
        return self.env_source.spec if self._progress is None else self._progress.spec

    @property
    def given(self) -> list[str]:
        """What was brought along beside environment and config: a run without it would be another."""
        return self._knowledge.given if self._progress is None else self._progress.setup.given

    @property
    def policies(self) -> list[NumpyPolicy]:
        """Each seed's policy; they need NumPy only."""
        if self._progress is None or self._progress.policies is None:
            raise UserError(
                "nothing was learnt yet. Call learn(total_timesteps) with more than the random steps first."
            )
        return self._progress.policies

    @property
    def progress(self) -> Progress | None:
        """Where its learning stands: networks, replay and all; None before it has begun."""
        return self._progress

    @property
    def run_folder(self) -> Path | None:
        """Where this agent has been learning, or was loaded from."""
        return self._folder

    @property
    def evaluation_episodes(self) -> int:
        """Test episodes per evaluation."""
        asked = self.config.loop.evaluation_episodes
        return self.env_source.evaluation_episodes if asked is None else asked

    @property
    def num_timesteps(self) -> int:
        """Simulator steps so far, per seed."""
        return 0 if self._progress is None else self._progress.step

    @property
    def random_timesteps(self) -> int:
        """Simulator steps with random actions, per seed, before anything is learnt."""
        num_prior = self._knowledge.num_rows if self._progress is None else self._progress.setup.prior_rows
        return random_steps(self.config, self.spec.time_limit, num_prior > 0) * self.spec.action_repeat

    def last_returns(self) -> dict[int, float]:
        """Each seed's most recent test return."""
        return {} if self._progress is None else self._progress.last_returns()

    def save(self, path: str | Path) -> None:
        """Writes the agent, its replay included, to a folder, or to one file if the name ends in `.zip`, from which
        `load` and further `learn` continue as if nothing had happened. An agent that was there before is replaced when
        the new one is complete."""
        if self._progress is None or not self._progress.machinery.whole:
            raise UserError("there is nothing to save: call learn(total_timesteps) first, and let it end.")
        with using(self.devices):
            write_agent(self._progress, Path(path))

    @classmethod
    def load(
        cls,
        path: str | Path,
        env: EnvLike | None = None,
        device: str | None = None,
        termination_rule: Callable[[Any], Any] | None = None,
        reward: Callable[[Any, Any, Any], Any] | None = None,
        seed_policy: Any = None,
        step: int | None = None,
        replay_episodes: str | None = None,
    ) -> "DHMBPO":
        """Reads what `save` wrote, or the last checkpoint of a run folder, or that at `step`. `env` is needed where the
        agent was not trained on a registered id; `termination_rule`, `reward` and `seed_policy` where it was given such
        a function. With `replay_episodes="never"`, training begins a new episode instead of continuing an interrupted
        one by repeating its actions. No code is imported that the files name."""
        with folder_of(Path(path)) as folder:
            saved, problems = read_newest(folder) if step is None else (read_step(folder, step), [])
            model = cls(
                saved.registered_id() if env is None else env,
                seed=saved.seeds[0],
                seeds=len(saved.seeds),
                config=changed(saved.config, {"loop.replay_episodes": replay_episodes} if replay_episodes else {}),
                device=device,
                termination_rule=termination_rule,
                reward=reward,
                seed_policy=seed_policy,
                check=False,
            )
            with using(model.devices):
                model._progress, changes = restore(saved, model.spec, model.devices, model._knowledge)
        model._notes = problems + changes
        model._folder = None if Path(path).is_file() else Path(path).resolve()
        return model

    def _best(self) -> NumpyPolicy:
        returns = self.last_returns()
        return max(zip(self.seeds, self.policies, strict=True), key=lambda pair: returns.get(pair[0], -np.inf))[1]

    def worker_spec(self) -> WorkerSpec:
        """What its worker processes are given."""
        loop = self.config.loop
        return WorkerSpec(
            self.env_source.make,
            self.spec,
            seed_policy=self._knowledge.seed_policy,
            exploration=exploration(loop),
            first_actions=first_actions(loop),
            random_episodes=loop.random_episodes and not {"data", "seed_policy"} & set(self.given),
            step_timeout=loop.step_timeout,
            replays=self.env_source.replays,
            is_single=self.env_source.is_single,
        )
