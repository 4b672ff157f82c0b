"""What a user knows beforehand and brings along: a reward function, recorded transitions, a policy for the start."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from doublehorizon.acting.env_runner import Batch
from doublehorizon.acting.policy import NumpyPolicy
from doublehorizon.action_scaling import to_own_units
from doublehorizon.algorithm.types import Task
from doublehorizon.envs.make import EnvSpec
from doublehorizon.errors import UserError


@dataclass(frozen=True)
class PriorKnowledge:
    """The reward as a function of observation, action (in the environment's own units) and next observation, all with
    any leading axes; transitions that were recorded before; and a policy that acts before the first fit."""

    reward: Callable[[Any, Any, Any], Any] | None = None
    data: Batch | None = None
    seed_policy: Any = None

    @property
    def num_rows(self) -> int:
        """Recorded transitions."""
        return 0 if self.data is None else len(self.data["reward"])

    @property
    def given(self) -> list[str]:
        """Which of them there are: a run without them would be another."""
        return [name for name in ("data", "reward", "seed_policy") if getattr(self, name) is not None]


def require_fit(policy: Any, spec: EnvSpec) -> None:
    """What acts first must be able to; a saved policy must be one for such an environment."""
    if policy is not None and not callable(policy) and not hasattr(policy, "predict"):
        raise UserError(
            f"seed_policy is {policy!r}, but a function from observation to action is needed, an object with predict, "
            "or a policy file."
        )
    if not isinstance(policy, NumpyPolicy):
        return
    has, needs = (policy.obs_mean.size, policy.act_size), (spec.obs_size, spec.act_size)
    if has != needs:
        raise UserError(
            f"the seed policy takes {has[0]} numbers as observation and gives {has[1]} as action, but {spec.name} has "
            f"{needs[0]} and {needs[1]}. Give a policy that was trained on this environment."
        )


def make_task(spec: EnvSpec, knowledge: PriorKnowledge, cut_after: int | None = None) -> Task:
    """The algorithm's `Task`: sizes, termination rule, known reward. `cut_after` is where an environment was seen to
    cut its episodes off before the time limit."""
    reward = None
    if knowledge.reward is not None:
        reward = _InOwnUnits(knowledge.reward, spec.action_low, spec.action_high)
    return Task(
        spec.obs_size, spec.act_size, spec.rule, spec.termination == "learned", reward, cut_after or spec.time_limit
    )


@dataclass(frozen=True)
class _InOwnUnits:
    """A user's reward function, for actions in [-1, 1]. Equal ones are equal, so that nothing is compiled twice."""

    reward: Callable[[Any, Any, Any], Any]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def __call__(self, obs: Any, act: Any, next_obs: Any) -> Any:
        low, high = (np.asarray(x, np.float32).reshape((1,) * (act.ndim - 1) + (-1,)) for x in (self.low, self.high))
        return self.reward(obs, to_own_units(act, low, high), next_obs).astype(np.float32)


def try_functions(name: str, task: Task) -> None:
    """A user's functions must work on JAX's arrays, with any leading axes; if not, that is a `UserError`."""
    obs, act = (jax.ShapeDtypeStruct((2, 3, size), jnp.float32) for size in (task.obs_size, task.act_size))
    for what, function, arguments in (
        ("termination rule", task.terminates, (obs,)),
        ("reward function", task.reward, (obs, act, obs)),
    ):
        if function is None:
            continue
        needs = (
            f"the {what} of {name} must map arrays [..., n] to one value [...] each, with operators, array methods or "
            "jax.numpy"
        )
        try:
            found = jax.eval_shape(function, *arguments)
        except Exception as problem:  # whatever a user's function raises
            raise UserError(f"{needs}; it raised {type(problem).__name__}: {str(problem).splitlines()[0]}") from problem
        if getattr(found, "shape", None) != (2, 3):
            raise UserError(f"{needs}; for arrays [2, 3, n] it returned {found}.")
