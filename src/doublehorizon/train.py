"""The loop around the algorithm: collect, learn, evaluate, log. Host code; the arithmetic is in `agent.py`."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from doublehorizon import agent
from doublehorizon.agreement import check_reward, check_termination
from doublehorizon.errors import RunError
from doublehorizon.estimate import seconds_left
from doublehorizon.logs import CsvLog, View
from doublehorizon.policy import NumpyPolicy
from doublehorizon.progress import Programs, Progress, prior_batch
from doublehorizon.workers import Crew

Callback = Callable[[Progress], bool | None]


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
    going = True
    try:
        if progress.iteration == 0:
            _learn_from_records(progress, clock, log, view)
            evaluations.start()
        while going and progress.step < total_steps:
            metrics = _iterate(progress, crew, clock, view)
            if metrics is not None:
                _log_progress(log, progress, metrics, clock.laps | _elapsed(progress))
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


def _learn_from_records(progress: Progress, clock: "_Clock", log: CsvLog, view: View) -> None:
    """Where what was recorded before is enough, the first policy comes from it alone: nothing random is done."""
    if progress.first_fit > 0 or progress.policies is not None:
        return
    ends = check_termination(progress, prior_batch(progress), view)
    progress.whole = False
    metrics = ends | _learn(progress, clock, view)
    progress.whole = True
    progress.seconds = clock.total()
    _log_progress(log, progress, metrics, {"time/collect_seconds": 0.0, **clock.laps, **_elapsed(progress)})


def _elapsed(progress: Progress) -> dict[str, float]:
    return {"time/time_elapsed": progress.seconds}


def _show_progress(
    progress: Progress, metrics: dict[str, np.ndarray] | None, laps: dict[str, float], total_steps: int, view: View
) -> None:
    """Where the run stands and, once something was learnt, how long the rest takes at most."""
    if metrics is None:
        view.advance(progress.step)
        return
    steps, first = progress.iteration_steps, progress.iteration == progress.first_fit
    last = -(-total_steps // (steps * progress.spec.action_repeat))
    plan = agent.plan(progress.config, progress.task, progress.num_rows, steps, first)
    done = (plan, float(np.mean(metrics["model/epochs"])), laps)
    rows = [progress.prior_rows + i * steps for i in range(progress.iteration + 1, last + 1)]
    left = seconds_left(progress.config, progress.task, steps, rows, done)
    view.advance(progress.step, left)
    if first:
        view.estimated(progress.seconds + left)


class _Evaluations:
    """Test episodes in the background: started with a snapshot of the policies, gathered when they are done."""

    def __init__(self, progress: Progress, crew: Crew, view: View, log: CsvLog):
        self._progress, self._crew, self._view, self._log = progress, crew, view, log
        self._started: dict[int, float] = {}

    def start(self) -> None:
        """Before the first fit, with random actions or the seed policy."""
        step, episodes = self._progress.step, self._progress.config.loop.evaluation_episodes
        if episodes == 0:
            return
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
    batch = crew.collect(progress.policies, progress.iteration_steps, progress.step)
    ends = check_termination(progress, batch, view)
    check_reward(progress, batch, view)
    progress.whole = False  # from here on the old state's memory is being reused
    progress.store(batch)
    progress.iteration += 1
    clock.lap("time/collect_seconds")
    metrics = None if progress.iteration < progress.first_fit else ends | _learn(progress, clock, view)
    progress.whole = True
    progress.seconds = clock.total()
    return metrics


def _learn(progress: Progress, clock: "_Clock", view: View) -> dict[str, np.ndarray]:
    """Fits the model, improves the policy, and brings the new policies to the host."""
    config, task, steps = progress.config, progress.task, progress.iteration_steps
    first = progress.iteration == progress.first_fit
    plan = agent.plan(config, task, progress.num_rows, steps, first)
    effort = plan.effort()
    if progress.programs is None:
        raise RuntimeError("no compiled programs: train() makes them")
    view.phase("compiling the fit")
    fit = progress.programs.fit.result()
    clock.lap("time/compile_seconds")
    view.phase(f"fitting the model, at most {plan.max_epochs} epochs")
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
