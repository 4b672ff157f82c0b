"""What happens between collecting steps and acting on them: the model is fitted, the policy improved. A seed that
diverges goes back to where it began and tries again, without the others noticing."""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from doublehorizon import agent, health
from doublehorizon.agent import AgentState
from doublehorizon.devices import fetch
from doublehorizon.errors import RunError
from doublehorizon.progress import Progress
from doublehorizon.view import View

_MOST_REPEATS = 3

Metrics = dict[str, np.ndarray]
"""Figures for `progress.csv`, each per seed."""


class Clock:
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


def learn(progress: Progress, clock: Clock, view: View) -> Metrics:
    """Fits every seed's model, improves its policy, and brings the new policies to the host."""
    before = progress.state
    state, metrics = _attempt(progress, before, clock, view)
    repeats = np.zeros(len(progress.seeds), np.int32)
    while any(signs := _evidence(progress, state, metrics)):
        sick = np.array([bool(line) for line in signs])
        told = "; ".join(f"seed {seed} ({line})" for seed, line in zip(progress.seeds, signs, strict=True) if line)
        if repeats[sick].max() == _MOST_REPEATS:
            raise RunError(
                f"diverged at step {progress.step} and again in {_MOST_REPEATS} repeats: {told}. A smaller "
                "policy.learning_rate may help, or rewards and observations nearer to 1."
            )
        repeats += sick
        view.warn(f"diverged at step {progress.step}: {told}; it goes back and tries again with other random numbers")
        again, figures = _attempt(progress, _other_chance(before, int(repeats.max())), clock, view)
        state = health.choose((jnp.asarray(sick), again), state)
        metrics = {name: np.where(sick, figures[name], value) for name, value in metrics.items()}
    progress.state = state
    progress.policies = progress.fetch_policies()
    clock.lap("time/improve_seconds")
    return metrics | {"train/repeats": repeats}


def _attempt(progress: Progress, state: AgentState, clock: Clock, view: View) -> tuple[AgentState, Metrics]:
    config, task, steps = progress.config, progress.task, progress.turn_steps
    first = progress.policies is None
    plan = agent.plan(config, task, progress.num_rows, steps, first)
    effort = plan.effort()
    if progress.programs is None:
        raise RuntimeError("no compiled programs: train() makes them")
    view.phase("compiling the fit")
    fit = progress.programs.fit.result()
    clock.lap("time/compile_seconds")
    view.phase(f"fitting the model, at most {plan.max_epochs} epochs" if config.has_model else "taking statistics")
    state, model_metrics = fit((config, effort, progress.replay), state)
    model_metrics = fetch(model_metrics)
    clock.lap("time/fit_seconds")
    view.phase("compiling the policy optimisation")
    improve = progress.programs.improve.result()
    clock.lap("time/compile_seconds")
    view.phase("improving the policy")
    state, policy_metrics = improve((config, task, steps, effort, progress.replay), state)
    policy_metrics = fetch(policy_metrics)
    clock.lap("time/improve_seconds")
    return state, model_metrics | policy_metrics


def _evidence(progress: Progress, state: AgentState, metrics: Metrics) -> list[str]:
    return health.evidence(progress.config.policy.discount, progress.num_rows, progress.replay, state, metrics)


def _other_chance(state: AgentState, attempt: int) -> AgentState:
    keys = jax.vmap(lambda key: jr.fold_in(key, attempt))(state.key)
    return eqx.tree_at(lambda s: s.key, state, keys)
