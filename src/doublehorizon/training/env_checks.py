"""Compares what is known of an environment, its termination rule and reward, with what it does."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from doublehorizon.acting.env_runner import Batch
from doublehorizon.algorithm.types import Task
from doublehorizon.envs.make import EnvSpec
from doublehorizon.envs.termination import Rule

_ROUNDING = 1e-6  # relative, ten times that of float32: environments decide on what they hold themselves


@dataclass(frozen=True)
class TerminationCheck:
    """How the known rule compares with the environment's own flags, over new transitions."""

    num_wrong: int
    num_steps: int
    num_ended: int
    metrics: dict[str, np.ndarray]
    """Columns for `progress.csv`, per seed; where the rule is learnt, the fit fills in precision and recall."""

    @property
    def problem(self) -> str:
        """How wrong the rule is, in words; nothing if it is right."""
        ended = f"the environment ended {self.num_ended}"
        return f"{self.num_wrong} of {self.num_steps} steps ({ended})" if self.num_wrong else ""


def check_termination(spec: EnvSpec, batch: Batch) -> TerminationCheck:
    """Compares the rule, if one is in use, with every flag of new transitions `[seed, step]`."""
    ended = batch["terminated"] > 0
    rule = spec.terminates if spec.termination == "known" else None
    wrong = 0 if rule is None else int(np.sum(contradictions(rule, batch["next_obs"], ended)))
    learned = spec.termination == "learned" or wrong > 0
    flags = np.zeros_like(ended)
    if not learned and spec.terminates is not None:
        flags = np.asarray(spec.terminates(batch["next_obs"]), bool)
    both = np.sum(flags & ended, axis=1)
    with np.errstate(invalid="ignore"):  # no end at all: there is no precision to speak of
        metrics = {
            "termination/learned": np.full(len(ended), int(learned)),
            "termination/ends": np.mean(ended, axis=1),
            "termination/precision": both / np.sum(flags, axis=1),
            "termination/recall": both / np.sum(ended, axis=1),
        }
    return TerminationCheck(wrong, ended.size, int(ended.sum()), metrics)


def contradictions(rule: Rule, next_obs: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Where the rule says otherwise, and would even if every number of the observation were a rounding error away."""
    wrong = np.asarray(rule(next_obs), bool) != ended
    suspects = next_obs[wrong]
    rng = np.random.default_rng(0)
    still = np.ones(len(suspects), bool)
    for _ in range(16 if len(suspects) else 0):
        moved = suspects * (1.0 + _ROUNDING * rng.choice([-1.0, 1.0], suspects.shape))
        still &= np.asarray(rule(moved.astype(np.float32)), bool) != ended[wrong]
    wrong[wrong] = still
    return wrong


def check_reward(task: Task, batch: Batch) -> str:
    """How a user's reward function differs from the environment's rewards, in words; nothing if it does not, or if
    there is none."""
    reward: Any = task.reward
    if reward is None:
        return ""
    computed = np.asarray(reward(batch["obs"], batch["act"], batch["next_obs"]))
    apart = np.abs(computed - batch["reward"])
    wrong = ~(apart <= 1e-3 * (1.0 + np.abs(batch["reward"])))  # what is not a number is wrong too
    return f"{wrong.mean():.0%} of the first steps, by up to {apart.max():.3g}" if wrong.mean() > 0.01 else ""
