"""What happens between collecting steps and acting on them: the model is fitted, the policy improved. A seed that
diverges goes back to where it began and tries again, without the others noticing."""

import time

import jax.numpy as jnp
import numpy as np

from doublehorizon import schedule
from doublehorizon.algorithm import agent
from doublehorizon.algorithm.agent import AgentState
from doublehorizon.algorithm.devices import fetch
from doublehorizon.algorithm.divergence import far_rows, select_seeds, signs_of_divergence
from doublehorizon.errors import RunError
from doublehorizon.run.progress import Progress, fetch_policies
from doublehorizon.run.run_state import LeftOut
from doublehorizon.signals import unstoppable
from doublehorizon.training.live_view import View

_MOST_REPEATS = 3

SeedMetrics = dict[str, np.ndarray]
"""Figures for `progress.csv` on the host, each `[seed]`."""


class Clock:
    """Seconds of the phases of an iteration, and of the whole run."""

    def __init__(self, before: float):
        self._begun = time.monotonic() - before
        self._last = time.monotonic()
        self._waits_since: float | None = None
        self.laps: dict[str, float] = {}

    def start(self) -> None:
        """Begins an iteration."""
        self._last, self.laps = time.monotonic(), {}

    def begin_wait(self) -> None:
        """The environments wait from now on."""
        self._waits_since = time.monotonic()

    def end_wait(self) -> None:
        """They go on. How long they waited counts for the iteration that begins."""
        waited = 0.0 if self._waits_since is None else time.monotonic() - self._waits_since
        self.laps["time/waited_seconds"] = self.laps.get("time/waited_seconds", 0.0) + waited

    def lap(self, name: str) -> None:
        """Adds the time since the last call to a phase."""
        now = time.monotonic()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    def total(self) -> float:
        """Seconds of the whole run, those of earlier processes included."""
        return time.monotonic() - self._begun


def learn(progress: Progress, clock: Clock, view: View) -> SeedMetrics:
    """Fits every seed's model, improves its policy, and brings the new policies to the host."""
    before = progress.agent
    after, metrics = _attempt(progress, before, clock, view)
    repeats = np.zeros(len(progress.seeds), np.int32)
    while any(signs := _signs(progress, after, metrics)):
        diverged = np.array([bool(line) for line in signs])
        report = "; ".join(f"seed {seed} ({line})" for seed, line in zip(progress.seeds, signs, strict=True) if line)
        if repeats[diverged].max() == _MOST_REPEATS:
            raise RunError(
                f"diverged at step {progress.step} and again in {_MOST_REPEATS} repeats: {report}. A smaller "
                "policy.learning_rate may help, or rewards and observations nearer to 1."
            )
        repeats += diverged
        view.warn(f"diverged at step {progress.step}: {report}; it goes back and tries again with other random numbers")
        _leave_out_far_rows(progress, diverged, view)
        before = agent.with_fresh_keys(before)
        again, figures = _attempt(progress, before, clock, view)
        after = select_seeds(jnp.asarray(diverged), again, after)
        metrics = {name: np.where(diverged, figures[name], value) for name, value in metrics.items()}
    progress.update(agent=after, policies=fetch_policies(progress.setup, after))
    clock.lap("time/improve_seconds")
    return metrics | {"train/repeats": repeats}


def _leave_out_far_rows(progress: Progress, diverged: np.ndarray, view: View) -> None:
    """Leaves rows out of the replay that lie far from all others, as a seed that learns from them diverges again."""
    flags, numbers = fetch(far_rows(jnp.asarray(progress.num_rows, jnp.int32), progress.replay))
    stored, capacity, found = progress.num_stored, progress.capacity, []
    age = (stored - 1 - np.arange(progress.num_rows)) % capacity  # of the row at each place
    names = progress.spec.obs_names
    names = [*names, "the reward", *(f"{name} after the step" for name in names)]
    for k in np.flatnonzero(diverged & flags.any(axis=1)):
        seed, far = progress.seeds[k], np.flatnonzero(flags[k])
        usual = np.flatnonzero(~flags[k, : progress.num_rows])
        # the next usual row: it is overwritten later than this one
        copies = usual[np.minimum(np.searchsorted(usual, far), len(usual) - 1)]
        found += [
            LeftOut(seed, int(stored - 1 - age[i]), int(stored - 1 - age[j]))
            for i, j in zip(far.tolist(), copies.tolist(), strict=True)
        ]
        transitions = "1 transition" if len(far) == 1 else f"{len(far)} transitions"
        view.warn(
            f"seed {seed} no longer trains on {transitions}: {names[numbers[k, far[0]]]} is an extreme outlier, over "
            f"1000 times the usual deviation (row {stored - 1 - age[far[0]]} of the replay)"
        )
    if found:
        with unstoppable():
            progress.leave_out(tuple(found))
            progress.update(left_out=progress.state.left_out + tuple(found))


def _attempt(progress: Progress, state: AgentState, clock: Clock, view: View) -> tuple[AgentState, SeedMetrics]:
    config, task, steps, replay = progress.config, progress.task, progress.setup.turn_steps, progress.replay
    effort = progress.setup.first_effort if progress.policies is None else None
    budget = agent.iteration_budget(config, task, progress.num_rows, steps, effort)
    programs = progress.machinery.programs
    if programs is None:
        raise RuntimeError("no compiled programs: train() makes them")
    view.phase("compiling the fit")
    fit = programs.fit.result()
    clock.lap("time/compile_seconds")
    view.phase(f"fitting the model, at most {budget.max_epochs} epochs" if config.has_model else "taking statistics")
    state, model_metrics = fit(config, budget.traced(), replay, state)
    model_metrics = fetch(model_metrics)
    if not task.learns_termination:  # precision and recall are those of the rule
        model_metrics = {name: x for name, x in model_metrics.items() if not name.startswith("termination/")}
    clock.lap("time/fit_seconds")
    view.phase("compiling the policy optimisation")
    improve = programs.improve.result()
    clock.lap("time/compile_seconds")
    view.phase("improving the policy")
    state, policy_metrics = improve(config, task, steps, budget.traced(), replay, state)
    policy_metrics = fetch(policy_metrics)
    clock.lap("time/improve_seconds")
    return state, model_metrics | policy_metrics


def _signs(progress: Progress, state: AgentState, metrics: SeedMetrics) -> list[str]:
    discount = schedule.discount(progress.config, progress.task.episode_steps)
    return signs_of_divergence(discount, progress.num_rows, progress.replay, state, metrics)
