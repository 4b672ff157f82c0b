"""An environment as a user gives it, looked at once: how to make it, and all that is known of it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym

from doublehorizon.config import Config
from doublehorizon.envs.gym_check import complaints, is_users_own
from doublehorizon.envs.make import EnvLike, EnvSpec, Rule, describe, factory, time_limit_note
from doublehorizon.envs.termination import rule_of_id
from doublehorizon.errors import UserError

_SAME = ("obs_size", "act_size", "time_limit", "action_repeat", "action_low", "action_high", "layout")


@dataclass(frozen=True)
class EnvSource:
    """An environment, and what a user should know of it. `make` makes one or, if `is_single`, hands out the only one
    that there is; `is_object` says that it is the user's own object."""

    make: Callable[[], gym.Env]
    is_single: bool
    is_object: bool
    spec: EnvSpec
    obs_space: gym.Space
    act_shape: tuple[int, ...]
    notes: list[str]
    replays: bool
    """Whether an interrupted episode may be continued by repeating its actions."""

    @property
    def evaluation_episodes(self) -> int:
        """Test episodes per evaluation, where the user does not say how many."""
        is_simulator = not self.is_single or (self.is_object and self.spec.name in gym.registry)
        return 10 if is_simulator else 0


def inspect_env(
    env: EnvLike, config: Config, num_seeds: int, rule: Rule | None = None, check: bool | None = None
) -> EnvSource:
    """Instantiate the environment once and read its spaces and limits. `rule` is the user's own of when it ends; with
    `check`, Gymnasium's `check_env` steps it, too, if it is the user's own. None: unless it may be a machine."""
    is_object, wanted = isinstance(env, gym.Env), max(num_seeds, config.loop.num_envs)
    is_single = is_object or config.loop.single_env
    if is_single and wanted > 1:
        what = "an environment object" if is_object else "a single environment (loop.single_env)"
        advice = "Pass an id or a function that makes one." if is_object else "Ask for one seed and one environment."
        raise UserError(f"{what} serves one seed, but {wanted} environments are needed. {advice}")
    _refuse_vectors(env)
    make = factory(env, config.loop)
    sample: Any = make()
    _refuse_vectors(sample)
    spec = describe(sample, config, env if isinstance(env, str) else None, rule)
    is_checked = (not is_single if check is None else check) and is_users_own(sample)
    notes = complaints(sample, spec.name) if is_checked else []
    notes += time_limit_note(sample, spec, config.loop)
    replays = not is_single and config.loop.replay_episodes == "auto" and _may_replay(sample)
    if is_single:
        make = lambda: sample  # noqa: E731
    else:
        sample.close()
    shape = sample.action_space.shape or ()
    return EnvSource(make, is_single, is_object, spec, sample.observation_space, shape, notes, replays)


def _may_replay(env: gym.Env) -> bool:
    """Whether the environment's author permits it; a machine's says `metadata = {"replay_episodes": False}`."""
    return bool((env.metadata or {}).get("replay_episodes", True))


def _refuse_vectors(env: Any) -> None:
    """Several environments in one are not stepped here."""
    is_sb3 = hasattr(env, "step_async") and hasattr(env, "num_envs")
    if is_sb3 or isinstance(env, gym.vector.VectorEnv):
        raise UserError(
            f"env is a {type(env).__name__}, which holds {env.num_envs} environments. Pass an id or a function that "
            f"makes one, and num_envs in the config for several: loop.num_envs = {env.num_envs}."
        )


def adapted(spec: EnvSpec, then: dict[str, Any], where: str) -> tuple[EnvSpec, list[str]]:
    """What goes on in this environment was learnt in one whose facts are `then`: all that a policy depends on must be
    the same. Where that one's ends were known, and this one is the same but for options, its ends are assumed to be the
    same too, which is told."""
    now, then = (json.loads(json.dumps(facts)) for facts in (spec.facts(), then))
    then.setdefault("layout", now["layout"])  # runs of version 0.1 say nothing of it
    for name in _SAME:
        if then.get(name) != now[name]:
            raise UserError(f"{where} was trained with {name} {then.get(name)}, but {spec.name} has {now[name]}.")
    if then.get("termination") != "known" or spec.terminates is not None or spec.name != then.get("name"):
        return spec, []
    note = (
        f"{spec.name} was made with options; when its episodes end is assumed to be as without them, and checked "
        "against every step"
    )
    return replace(spec, terminates=rule_of_id(spec.name)), [note]
