"""The loop around the algorithm: collect, learn, evaluate, log. Host code; the arithmetic is in `agent.py`."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from doublehorizon import agent
from doublehorizon import replay as replays
from doublehorizon.agent import AgentState
from doublehorizon.config import Config, seed_iterations, steps_per_iteration
from doublehorizon.devices import Devices, find_devices, over_seeds
from doublehorizon.envs.make import EnvSpec
from doublehorizon.errors import RunError, UserError
from doublehorizon.estimate import seconds_left
from doublehorizon.logs import CsvLog, View
from doublehorizon.policy import NumpyPolicy
from doublehorizon.replay import Replay
from doublehorizon.types import Task, Transition
from doublehorizon.workers import Batch, Crew

Callback = Callable[["Progress"], bool | None]


@dataclass
class Progress:
    """Where a run stands: everything that changes while it learns. Arrays have a leading seed axis."""

    config: Config
    spec: EnvSpec
    seeds: list[int]
    devices: Devices
    state: AgentState
    replay: Replay
    iteration: int = 0
    seconds: float = 0.0
    returns: dict[int, dict[int, float]] = field(default_factory=dict)
    """Test return by step and seed."""
    policies: list[NumpyPolicy] | None = None
    """Each seed's policy after the last whole iteration, on the host; None before the first fit."""
    programs: "Programs | None" = None
    """The compiled fit and policy optimisation; None before the first `train`, or where the replay has grown."""
    whole: bool = True
    """False from the start of an iteration to its end: a run that was stopped in between cannot go on."""

    @property
    def task(self) -> Task:
        rule = None if self.spec.never_ends else self.spec.terminates
        return Task(self.spec.obs_size, self.spec.act_size, rule)

    @property
    def iteration_steps(self) -> int:
        """Agent steps of an iteration."""
        return steps_per_iteration(self.config, self.spec.time_limit)

    @property
    def step(self) -> int:
        """Simulator steps so far, per seed."""
        return self.iteration * self.iteration_steps * self.spec.action_repeat

    @property
    def num_rows(self) -> int:
        """Transitions in each seed's replay."""
        return min(self.iteration * self.iteration_steps, self.replay.rows.reward.shape[1])

    @property
    def first_fit(self) -> int:
        """The iteration at whose end the first fit happens."""
        return seed_iterations(self.config, self.spec.time_limit)

    def fetch_policies(self) -> list[NumpyPolicy]:
        """Each seed's policy, brought to the host."""
        actor, normalizer = jax.device_get((self.state.policy.actor, self.state.world.obs_normalizer))
        layers = actor.mlp.layers
        low, high = (np.asarray(x, np.float32) for x in (self.spec.action_low, self.spec.action_high))
        return [
            NumpyPolicy(
                tuple(layer.weight[k] for layer in layers),
                tuple(layer.bias[k] for layer in layers),
                normalizer.mean[k],
                normalizer.std[k],
                low,
                high,
            )
            for k in range(len(self.seeds))
        ]

    def last_returns(self) -> dict[int, float]:
        """The most recent test return of each seed that has one."""
        return {seed: value for step in sorted(self.returns) for seed, value in self.returns[step].items()}


def begin(
    config: Config, spec: EnvSpec, seeds: list[int], total_steps: int, devices: Devices | None = None
) -> Progress:
    """An untrained run with room for `total_steps` simulator steps."""
    task = Task(spec.obs_size, spec.act_size, None)
    capacity = _capacity(config, spec, total_steps)
    sizes = (spec.obs_size, spec.act_size, config.model.members, config.fit.held_out_every)

    def one_seed(seed: jax.Array) -> tuple[AgentState, Replay]:
        return agent.initial_state(config, task, seed), replays.empty(capacity, *sizes)

    state, replay = eqx.filter_jit(lambda seeds: over_seeds(jax.vmap(one_seed), seeds))(jnp.asarray(seeds))
    return Progress(config, spec, seeds, devices or find_devices(None, len(seeds)), state, replay)


class Programs:
    """The fit and the policy optimisation, compiled in the background while the first steps are collected."""

    def __init__(self, progress: Progress):
        config, task, steps = progress.config, progress.task, progress.iteration_steps
        # only their shapes count: `store` may already have reused the memory of these arrays
        state, replay = progress.state, progress.replay
        effort = agent.plan_effort(config, task, steps, steps, first=True)

        devices, inputs = progress.devices, (config, task, steps, effort, replay)
        self.fit = agent.fit_model.in_background(devices, (config, effort, replay), state)
        self.improve = agent.improve_policy.in_background(devices, inputs, state)


def _capacity(config: Config, spec: EnvSpec, total_steps: int) -> int:
    """Rows of the replay: what the run will collect, at most the configured number, whole iterations in any case."""
    steps = steps_per_iteration(config, spec.time_limit)
    iterations = -(-total_steps // (steps * spec.action_repeat))
    return max(1, min(iterations, config.loop.replay_capacity // steps)) * steps


def extend(progress: Progress, total_steps: int) -> None:
    """Makes room for more steps in a replay that was sized for fewer: twice as much at least, as each new size is
    compiled anew."""
    held = progress.replay.rows.reward.shape[1]
    if _capacity(progress.config, progress.spec, total_steps) > held:
        capacity = _capacity(progress.config, progress.spec, max(total_steps, 2 * held * progress.spec.action_repeat))
        num_rows = jnp.asarray(progress.num_rows, jnp.int32)
        progress.replay = jax.vmap(lambda replay: replays.grow(replay, capacity, num_rows))(progress.replay)
        progress.programs = None


def train(
    progress: Progress, crew: Crew, total_steps: int, out: Path | None, view: View, callback: Callback | None
) -> None:
    """Iterates until `total_steps` simulator steps per seed are done, or the callback returns False. However it ends,
    the policies learnt so far are in `out`."""
    log = CsvLog(out and out / "progress.csv")
    evaluations = _Evaluations(
        progress, crew, view, CsvLog(out and out / "eval.csv", ["step", "time", "reward", "seed"])
    )
    clock = _Clock(progress.seconds)
    view.advance(progress.step)
    if progress.programs is None:
        progress.programs = Programs(progress)
    if progress.iteration == 0:
        evaluations.start()
    going = True
    try:
        while going and progress.step < total_steps:
            metrics = _iterate(progress, crew, clock, view)
            if metrics is not None:
                _log_progress(log, progress, metrics, clock.laps | {"time/time_elapsed": progress.seconds})
            if _is_evaluation(progress):
                evaluations.start()
            evaluations.gather()
            _show_progress(progress, metrics, clock.laps, total_steps, view)
            going = callback is None or callback(progress) is not False
        if progress.policies is not None and not _is_evaluation(progress):
            evaluations.start()
        view.phase("evaluating")
        evaluations.gather(block=True)
    finally:
        if out is not None and progress.policies is not None:
            save_policies(progress, progress.policies, out)


def _show_progress(
    progress: Progress, metrics: dict[str, np.ndarray] | None, laps: dict[str, float], total_steps: int, view: View
) -> None:
    """Where the run stands and, once something was learnt, how long the rest takes at most."""
    if metrics is None:
        view.advance(progress.step)
        return
    steps, first = progress.iteration_steps, progress.iteration == progress.first_fit
    last = -(-total_steps // (steps * progress.spec.action_repeat))
    effort = agent.plan_effort(progress.config, progress.task, progress.num_rows, steps, first)
    done = (effort, float(np.mean(metrics["model/epochs"])), laps)
    left = seconds_left(progress.config, progress.task, steps, range(progress.iteration + 1, last + 1), done)
    view.advance(progress.step, left)
    if first:
        view.estimated(progress.seconds + left)


class _Evaluations:
    """Test episodes in the background: started with a snapshot of the policies, gathered when they are done."""

    def __init__(self, progress: Progress, crew: Crew, view: View, log: CsvLog):
        self._progress, self._crew, self._view, self._log = progress, crew, view, log
        self._started: dict[int, float] = {}

    def start(self) -> None:
        """Before the first fit, with random actions."""
        step, episodes = self._progress.step, self._progress.config.loop.evaluation_episodes
        self._started[step] = self._progress.seconds
        self._crew.start_evaluation(self._progress.policies, step, episodes)

    def gather(self, block: bool = False) -> None:
        """Logs what is done; with `block`, waits for all. A row's time is that at which its policy was ready."""
        for step, seed, value in sorted(self._crew.finished_evaluations(block)):
            returns = self._progress.returns.setdefault(step, {})
            returns[seed] = value
            self._log.append({"step": step, "time": self._started[step], "reward": value, "seed": seed})
            if len(returns) == len(self._progress.seeds):
                self._view.evaluated(step, list(returns.values()))


def _iterate(progress: Progress, crew: Crew, clock: "_Clock", view: View) -> dict[str, np.ndarray] | None:
    """One iteration; the metrics, per seed, are None while only random steps are collected."""
    clock.start()
    view.phase("collecting")
    batch = crew.collect(progress.policies, progress.iteration_steps)
    _check_termination(progress.spec, batch)
    rows = Transition(**{name: jnp.asarray(value) for name, value in batch.items()})
    progress.whole = False  # from here on the old state's memory is being reused
    progress.replay, progress.state = agent.store(progress.replay, progress.state, rows)
    progress.iteration += 1
    clock.lap("time/collect_seconds")
    metrics = None if progress.iteration < progress.first_fit else _learn(progress, clock, view)
    progress.whole = True
    progress.seconds = clock.total()
    return metrics


def _learn(progress: Progress, clock: "_Clock", view: View) -> dict[str, np.ndarray]:
    """Fits the model, improves the policy, and brings the new policies to the host."""
    config, task, steps = progress.config, progress.task, progress.iteration_steps
    first = progress.iteration == progress.first_fit
    effort = agent.plan_effort(config, task, progress.num_rows, steps, first)
    if progress.programs is None:
        raise RuntimeError("no compiled programs: train() makes them")
    view.phase("compiling the fit")
    fit = progress.programs.fit.result()
    clock.lap("time/compile_seconds")
    view.phase(f"fitting the model, at most {int(effort.max_epochs)} epochs")
    progress.state, model_metrics = fit((config, effort, progress.replay), progress.state)
    model_metrics = jax.device_get(model_metrics)
    clock.lap("time/fit_seconds")
    view.phase("compiling the policy optimisation")
    improve = progress.programs.improve.result()
    clock.lap("time/compile_seconds")
    view.phase("improving the policy")
    progress.state, policy_metrics = improve((config, task, steps, effort, progress.replay), progress.state)
    policies = progress.fetch_policies()
    clock.lap("time/improve_seconds")
    _check_finite(progress, policies)
    progress.policies = policies
    return model_metrics | jax.device_get(policy_metrics)


def _check_finite(progress: Progress, policies: list[NumpyPolicy]) -> None:
    for seed, policy in zip(progress.seeds, policies, strict=True):
        if not all(np.isfinite(weight).all() for weight in policy.weights):
            raise RunError(
                f"seed {seed} diverged at step {progress.step}: its policy is no longer finite. The policies of the "
                "iteration before are kept. Another seed or a smaller policy.learning_rate may help."
            )


def _is_evaluation(progress: Progress) -> bool:
    due = progress.iteration % progress.config.loop.evaluate_every == 0
    return progress.policies is not None and (due or progress.iteration == progress.first_fit)


def _check_termination(spec: EnvSpec, batch: Batch) -> None:
    """A rule that contradicts the environment would teach the model a wrong world. Rounding to float32 may flip single
    flags at the edge of a rule, so there a contradiction is more than one in a thousand."""
    said = batch["terminated"] > 0
    known = spec.terminates is not None
    expected = np.asarray(spec.terminates(batch["next_obs"])) if spec.terminates is not None else np.zeros_like(said)
    wrong = int(np.sum(said != expected))
    if wrong > (said.size / 1000 if known else 0):
        rule = f"its known termination rule says otherwise for {wrong}" if known else "no termination rule is known"
        raise UserError(
            f"{spec.name} ended {int(said.sum())} of {said.size} steps, but {rule}. Give the environment a method "
            "is_terminal(next_obs) that works on arrays [..., observation]."
        )


def _log_progress(log: CsvLog, progress: Progress, metrics: dict[str, np.ndarray], seconds: dict[str, float]) -> None:
    for k, seed in enumerate(progress.seeds):
        row: dict[str, Any] = {
            "time/total_timesteps": progress.step,
            "time/iterations": progress.iteration,
            "seed": seed,
        }
        log.append(row | {name: value[k].item() for name, value in sorted(metrics.items())} | seconds)


def save_policies(progress: Progress, policies: list[NumpyPolicy], out: Path) -> None:
    """Writes `policy/seed<k>.safetensors`, and the returns by which `load_policy` picks the best of them."""
    for seed, policy in zip(progress.seeds, policies, strict=True):
        policy.save(out / "policy" / f"seed{seed}.safetensors")
    returns = {str(seed): value for seed, value in progress.last_returns().items()}
    (out / "policy" / "returns.json").write_text(json.dumps(returns, indent=1) + "\n")


class _Clock:
    """Seconds of the phases of an iteration, and of the whole run."""

    def __init__(self, before: float):
        self._begun = time.monotonic() - before
        self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    def start(self) -> None:
        self._last, self.laps = time.monotonic(), {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    def total(self) -> float:
        return time.monotonic() - self._begun
