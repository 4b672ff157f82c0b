"""Holds what is known of an environment against what it does."""

from dataclasses import replace
from typing import Any

import numpy as np

from doublehorizon import agent
from doublehorizon.envs.termination import Rule
from doublehorizon.errors import UserError
from doublehorizon.progress import Programs, Progress
from doublehorizon.seats import Batch
from doublehorizon.view import View

_ROUNDING = 1e-6  # relative, ten times that of float32: environments decide on what they hold themselves


def check_termination(progress: Progress, batch: Batch, view: View) -> dict[str, np.ndarray]:
    """Compares the rule with every flag of new transitions, `[seed, step]`. A rule that contradicts the environment
    would teach the policy a wrong world: from then on the model learns when episodes end. Returns, per seed, the
    columns for `progress.csv`; where the rule is learnt, the fit fills in the rest."""
    spec, said = progress.spec, batch["terminated"] > 0
    if spec.termination == "known" and spec.terminates is not None:
        wrong = int(np.sum(contradictions(spec.terminates, batch["next_obs"], said)))
        if wrong:
            _give_up(progress, view, f"{wrong} of {said.size} steps (the environment ended {int(said.sum())})")
    learned = progress.spec.termination == "learned"
    flags = (
        np.zeros_like(said)
        if learned or spec.terminates is None
        else np.asarray(spec.terminates(batch["next_obs"]), bool)
    )
    both = np.sum(flags & said, axis=1)
    with np.errstate(invalid="ignore"):  # no end at all: there is no precision to speak of
        return {
            "termination/learned": np.full(len(said), int(learned)),
            "termination/ends": np.mean(said, axis=1),
            "termination/precision": both / np.sum(flags, axis=1),
            "termination/recall": both / np.sum(said, axis=1),
        }


def contradictions(rule: Rule, next_obs: np.ndarray, said: np.ndarray) -> np.ndarray:
    """Where the rule says otherwise, and would even if every number of the observation were a rounding error away."""
    wrong = np.asarray(rule(next_obs), bool) != said
    suspects = next_obs[wrong]
    rng = np.random.default_rng(0)
    still = np.ones(len(suspects), bool)
    for _ in range(16 if len(suspects) else 0):
        moved = suspects * (1.0 + _ROUNDING * rng.choice([-1.0, 1.0], suspects.shape))
        still &= np.asarray(rule(moved.astype(np.float32)), bool) != said[wrong]
    wrong[wrong] = still
    return wrong


def _give_up(progress: Progress, view: View, how_wrong: str) -> None:
    name = progress.spec.name
    if progress.config.termination == "known":
        raise UserError(
            f"the termination rule of {name} contradicts the environment in {how_wrong}. Mend the rule (a method "
            "is_terminal(next_obs) that works on arrays [..., observation]), or let it be learnt (termination 'auto')."
        )
    view.warn(f"{name}: its known termination rule is wrong in {how_wrong}; the model now learns when episodes end")
    progress.spec = replace(progress.spec, termination="learned")
    progress.state = agent.learn_termination(progress.config, progress.task, progress.state)
    progress.programs = Programs(progress)


def check_reward(progress: Progress, batch: Batch, view: View) -> None:
    """Says, once, where a user's reward function differs from the rewards of the first steps."""
    reward: Any = progress.task.reward
    if reward is None or progress.step > 0:
        return
    given = np.asarray(reward(batch["obs"], batch["act"], batch["next_obs"]))
    apart = np.abs(given - batch["reward"])
    wrong = ~(apart <= 1e-3 * (1.0 + np.abs(batch["reward"])))  # what is not a number is wrong too
    if wrong.mean() > 0.01:
        view.warn(
            f"{progress.spec.name}: the given reward function differs from the environment's reward in "
            f"{wrong.mean():.0%} of the first steps, by up to {apart.max():.3g}; the policy learns from the function"
        )
