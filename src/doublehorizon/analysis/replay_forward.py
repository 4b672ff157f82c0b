"""Replay-forward: fits as a training would, over the stored transitions of one, and asks each model about the
transitions that came next. Nothing is learnt from what it says, so there is no noise of learning in the answer."""

import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from doublehorizon.algorithm import agent
from doublehorizon.algorithm import replay_buffer as replays
from doublehorizon.algorithm.model_fit import as_one_gaussian, negative_log_likelihood
from doublehorizon.algorithm.types import Task, Transition
from doublehorizon.algorithm.world_model import WorldModel, normalized_target
from doublehorizon.atomic_files import require_regular
from doublehorizon.config import Config
from doublehorizon.errors import UserError
from doublehorizon.run.replay_files import DamageError, read_first
from doublehorizon.schedule import first_effort, steps_per_iteration

Rows = dict[str, np.ndarray]
"""The fields of transitions, `[row, ...]`."""

_OPEN_LOOP = 5  # steps, those of a training rollout
_TIME_LIMIT = 1000  # of which iterations are made, where the config does not say how long they are


@dataclass(frozen=True)
class Plan:
    """Over which rows: the first fit has the first `first`, fits from `scored_from` on are asked about the rows that
    come next, up to `last`."""

    first: int = 5000
    scored_from: int = 10_000
    last: int = 20_000


@dataclass(frozen=True)
class Score:
    """How well the next rows were predicted, one step ahead. Errors are root mean squares, in units of the targets'
    standard deviation over all rows; likelihoods are per row; the lower, the better. Rewards of terminating steps count
    in `terminal_reward_rmse` only."""

    member_rmse: float
    """Of single members, which rollouts follow."""
    mean_rmse: float
    """Of the members' mean."""
    reward_rmse: float
    """Of single members, for the reward of steps that continue alone."""
    terminal_reward_rmse: float
    """Of what is predicted for the reward of steps that terminate, in the same unit; not a number if none does."""
    open_loop_rmse: float
    """Of single members after five steps of real actions, in units of the observations' spread; not a number if all
    episodes are shorter."""
    member_nll: float
    """Negative log-likelihood under single members."""
    ensemble_nll: float
    """Under the ensemble, taken as one Gaussian."""
    disagreement: float
    """Of the members, as a standard deviation."""
    calibration: float
    """Mean squared error over the variance that the ensemble claims, number by number: 1 if it knows what it does not
    know, above 1 if it is too sure."""
    minibatches: int
    """Of all fits that were asked."""
    seconds: float
    """That these took."""


def replay_forward(config: Config, rows: Rows, plan: Plan, seed: int, tick: Callable[[], None] = lambda: None) -> Score:
    """Fits and asks by turns; `tick` is called after each fit."""
    steps = steps_per_iteration(config, _TIME_LIMIT)
    _check(plan, steps, config.fit.held_out_every, len(rows["reward"]))
    terminated = rows["terminated"][: plan.last] > 0
    # a rule or learnt termination makes no difference to how the model is fitted
    task = Task(rows["obs"].shape[1], rows["act"].shape[1], None, learns_termination=bool(terminated.any()))
    targets = _targets(rows)[: plan.last].astype(np.float64)
    targets[terminated, 0] = np.nan
    unit = np.nan_to_num(np.nanstd(targets, axis=0))
    unit = jnp.asarray(np.where(unit > 0, unit, 1.0), jnp.float32)
    fitting = _Fitting(config, task, plan, steps, seed)
    answers, off, seconds, minibatches = [], [], 0.0, 0
    for end in _ends(plan, steps):
        world, took, count = fitting.advance(rows, end)
        if end >= plan.scored_from:
            apart = world.learns_end_rewards(config)
            answer, open_loop = _ask(world, _part(rows, end, steps + _OPEN_LOOP), unit, apart)
            linked = _linked(rows, end, steps)
            answers.append({name: float(value) for name, value in answer.items()})
            off.append(np.asarray(open_loop)[linked])
            seconds, minibatches = seconds + took, minibatches + count
        tick()
    total = {name: np.array([answer[name] for answer in answers]) for name in answers[0]}
    ends = total.pop("ends")
    terminal = total.pop("terminal").sum() / ends.sum() if ends.any() else np.nan
    mean = {name: float(np.mean(values)) for name, values in total.items()}
    open_loops = np.concatenate(off)
    return Score(
        member_rmse=mean["member"] ** 0.5,
        mean_rmse=mean["mean"] ** 0.5,
        reward_rmse=mean["reward"] ** 0.5,
        terminal_reward_rmse=float(terminal) ** 0.5,
        open_loop_rmse=float(np.mean(open_loops)) ** 0.5 if open_loops.size else float("nan"),
        member_nll=mean["member_nll"],
        ensemble_nll=mean["ensemble_nll"],
        disagreement=mean["disagreement"] ** 0.5,
        calibration=mean["calibration"],
        minibatches=minibatches,
        seconds=seconds,
    )


def num_fits(config: Config, plan: Plan) -> int:
    """How often `replay_forward` ticks."""
    return len(_ends(plan, steps_per_iteration(config, _TIME_LIMIT)))


def read_rows(path: Path, most: int) -> Rows:
    """The first transitions of a run's first seed, or of an `.npz` file with the arrays obs, act (in [-1, 1]), reward,
    next_obs and terminated."""
    names = tuple(Transition.__dataclass_fields__)
    try:
        if path.suffix == ".npz":
            require_regular(path)
            with np.load(path, allow_pickle=False) as file:
                return {name: np.asarray(file[name][:most], np.float32) for name in names}
        rows = read_first(path / "replay", most)
        return {name: rows[name][0] for name in names}
    except (OSError, KeyError, ValueError, TypeError, MemoryError, zipfile.BadZipFile, DamageError) as problem:
        raise UserError(
            f"{path} holds no transitions that can be read ({problem}). Give a run folder, or an .npz file with "
            f"{', '.join(names)}."
        ) from problem


class _Fitting:
    """A training without a policy: rows are stored, the model is fitted."""

    def __init__(self, config: Config, task: Task, plan: Plan, steps: int, seed: int):
        self._config, self._task, self._plan, self._steps = config, task, plan, steps
        seeds = jnp.asarray([seed])
        sizes = (task.obs_size, task.act_size, config.model.members, config.fit.held_out_every)
        self._state = jax.vmap(lambda s: agent.initial_state(config, task, s))(seeds)
        self._replay = jax.vmap(lambda _: replays.empty(plan.last, *sizes))(seeds)
        self._stored = 0

    def advance(self, rows: Rows, end: int) -> tuple[WorldModel, float, int]:
        """Stores the rows up to `end` and fits: the model, the seconds of the fit, its minibatches."""
        first = self._stored == 0
        new = jax.tree.map(lambda x: x[None], _part(rows, self._stored, end - self._stored))
        self._replay, self._state = agent.store((new, self._state), self._replay)
        self._stored = end
        effort = first_effort(self._config, end / self._steps) if first else None
        budget = agent.iteration_budget(self._config, self._task, end, self._steps, effort)
        if first:  # compiles, and fits nothing
            nothing = replace(budget, max_epochs=0)
            jax.block_until_ready(agent.fit_model(self._config, nothing.traced(), self._replay, self._state))
        begun = time.perf_counter()
        fitted = agent.fit_model(self._config, budget.traced(), self._replay, self._state)
        self._state, metrics = jax.block_until_ready(fitted)
        took = time.perf_counter() - begun
        world = jax.tree.map(lambda x: x[0], self._state.world)
        return world, took, int(metrics["model/epochs"][0]) * int(budget.fit_batches)


@eqx.filter_jit
def _ask(
    world: WorldModel, rows: Transition, unit: Float[Array, " target"], apart: bool
) -> tuple[dict[str, Float[Array, ""]], Float[Array, " rows"]]:
    """Mean squares and likelihoods over the rows but the last few, which open loops end in; and the mean square of the
    open loop from each row on. `apart` says that the termination model predicts the rewards of terminating steps."""
    count = rows.reward.shape[0] - _OPEN_LOOP
    asked = jax.tree.map(lambda x: x[:count], rows)
    target = normalized_target(world.target_normalizer, asked.obs, asked.reward, asked.next_obs)
    mean, log_noise = _predict(world, asked.obs, asked.act)
    log_noise = jnp.broadcast_to(log_noise, mean.shape)
    scale = (world.target_normalizer.std / unit)[None]  # from the model's units to the common ones
    square = jnp.square((mean - target[None]) * scale[None])
    running = 1.0 - asked.terminated
    counted = jnp.ones_like(target).at[:, 0].set(running)
    terminal = jnp.mean(square[..., 0], axis=0)
    if apart and world.termination_model is not None and world.end_rewards is not None:
        _, ended = world.termination_model.predict(world.obs_normalizer, asked.obs, asked.act, asked.next_obs)
        if ended is not None:
            terminal = jnp.square((world.end_rewards.denormalize(ended) - asked.reward) / unit[0])

    def average(x: Float[Array, "*member rows target"]) -> Float[Array, ""]:
        return jnp.mean(x, where=jnp.broadcast_to(counted.astype(bool), x.shape))

    middle, variance = as_one_gaussian(mean, log_noise)
    disagreement = jnp.var(mean, axis=0, ddof=1)
    ensemble_nll = 0.5 * (jnp.square(middle - target) / variance + jnp.log(variance)) + jnp.log(scale)
    member_nll = jax.vmap(lambda m, n: negative_log_likelihood(m, n, target, 1e-3) + jnp.log(scale))(mean, log_noise)
    answer = {
        "member": average(square),
        "mean": average(jnp.square((middle - target) * scale)),
        "reward": jnp.mean(square[..., 0], where=jnp.broadcast_to(running.astype(bool)[None], square.shape[:2])),
        "terminal": jnp.sum(terminal, where=asked.terminated > 0),
        "ends": jnp.sum(asked.terminated),
        "member_nll": jnp.mean(jnp.sum(member_nll * counted[None], axis=-1)),
        "ensemble_nll": jnp.mean(jnp.sum(ensemble_nll * counted, axis=-1)),
        "disagreement": average(disagreement * jnp.square(scale)),
        "calibration": average(jnp.square(middle - target) / variance),
    }

    def follow(obs: Float[Array, "member rows obs"], t: Array) -> tuple[Float[Array, "member rows obs"], None]:
        act = jax.lax.dynamic_slice_in_dim(rows.act, t, count)
        changed, _ = _predict(world, obs, act)
        return obs + world.target_normalizer.denormalize(changed)[..., 1:], None

    begin = jnp.broadcast_to(asked.obs[None], (mean.shape[0], *asked.obs.shape))
    end, _ = jax.lax.scan(follow, begin, jnp.arange(_OPEN_LOOP))
    off = (end - rows.obs[None, _OPEN_LOOP:]) / world.obs_normalizer.std[None, None]
    return answer, jnp.mean(jnp.square(off), axis=(0, 2))


def _predict(
    world: WorldModel, obs: Float[Array, "*member rows obs"], act: Float[Array, "rows act"]
) -> tuple[Float[Array, "member rows target"], Float[Array, "member noises target"]]:
    """What each member predicts, of the same states or of its own."""
    states = obs if obs.ndim == 3 else jnp.broadcast_to(obs[None], (world.members.log_noise.shape[0], *obs.shape))

    def one(member, obs):
        return member(jnp.concatenate([world.obs_normalizer.normalize(obs), act], axis=-1))

    return eqx.filter_vmap(one)(world.members, states)


def _part(rows: Rows, begin: int, count: int) -> Transition:
    return Transition(**{name: jnp.asarray(x[begin : begin + count]) for name, x in rows.items()})


def _linked(rows: Rows, begin: int, count: int) -> Bool[np.ndarray, " rows"]:
    """From which rows on each of the next ones begins where the one before it ended."""
    part = {name: x[begin : begin + count + _OPEN_LOOP] for name, x in rows.items()}
    goes_on = np.all(part["next_obs"][:-1] == part["obs"][1:], axis=1) & (part["terminated"][:-1] == 0)
    return np.array([bool(np.all(goes_on[i : i + _OPEN_LOOP])) for i in range(count)])


def _targets(rows: Rows) -> np.ndarray:
    return np.concatenate([rows["reward"][:, None], rows["next_obs"] - rows["obs"]], axis=1)


def _ends(plan: Plan, steps: int) -> range:
    """How many rows each fit has."""
    return range(plan.first, plan.last - steps + 1, steps)


def _check(plan: Plan, steps: int, group_size: int, num_rows: int) -> None:
    if not 0 < plan.first <= plan.scored_from <= plan.last - steps:
        raise UserError(
            f"fits from {plan.first} on, asked from {plan.scored_from} to {plan.last}, leave nothing to ask about: "
            f"needed are first <= scored_from <= last - {steps} (the steps of an iteration)."
        )
    if plan.first % group_size or plan.last % group_size:
        raise UserError(
            f"--first is {plan.first} and --last {plan.last}, but multiples of {group_size} are needed: one transition "
            "in so many may be held out."
        )
    if num_rows < plan.last + _OPEN_LOOP:
        raise UserError(f"there are {num_rows} transitions, but --last {plan.last} needs {plan.last + _OPEN_LOOP}.")
