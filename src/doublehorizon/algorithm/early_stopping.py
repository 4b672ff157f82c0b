"""Fits the ensemble as the paper does: until its score on rows held out for that no longer improves, inside the
compiled program.

`fit` works on all seeds at once, and `_run` and `_advance` have an explicit seed axis: a vmapped `while_loop` would run
every seed until the last one stops. Everything below `_advance` is written for one seed.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from doublehorizon.algorithm import replay_buffer as replays
from doublehorizon.algorithm.kernels import on_gpu
from doublehorizon.algorithm.model_fit import (
    Examples,
    as_examples,
    begin_optimizer,
    ensemble_score,
    for_each_member,
    reward_noise,
    row_totals,
    train_epoch,
)
from doublehorizon.algorithm.networks import Dynamics
from doublehorizon.algorithm.replay_buffer import ReplayBuffer
from doublehorizon.algorithm.types import Budget
from doublehorizon.algorithm.world_model import WorldModel
from doublehorizon.config import Config


class FitData(eqx.Module):
    """Real experience as the fit sees it; the validation rows are the same in every epoch (a paired test)."""

    training: Examples
    weight: Float[Array, "rows member"]
    validation: Examples
    reward_noise: Float[Array, ""]


class FitState(eqx.Module):
    """A fit in progress. `stale` counts the epochs since the last improvement."""

    members: Dynamics
    opt_state: optax.OptState
    best_members: Dynamics
    best_score: Float[Array, " rows"]
    best_error: Float[Array, ""]
    stale: Int[Array, ""]
    epoch: Int[Array, ""]
    active: Bool[Array, ""]
    key: PRNGKeyArray


def fit(
    config: Config, budget: Budget, replay: ReplayBuffer, world: WorldModel, key: Key[Array, " seed"]
) -> tuple[WorldModel, dict[str, Array]]:
    """Fits every seed's ensemble until its validation score stops improving and keeps the best parameters. All
    arguments but `config` and `budget` have a leading seed axis; the keys are consumed."""
    key_rows, key_epochs = jnp.unstack(jax.vmap(jr.split)(key), axis=1)
    data = jax.vmap(lambda r, w, k: _prepare(config, budget, r, w, k))(replay, world, key_rows)
    state = jax.vmap(lambda d, w, k: _begin(config, budget, d, w.members, k))(data, world, key_epochs)
    state = _run(config, budget, data, state)
    valid = jnp.arange(state.best_score.shape[-1])[None] < _num_validation(config, budget)
    metrics = {
        "model/epochs": state.epoch,
        "model/validation_score": jnp.mean(state.best_score, axis=-1, where=valid),
        "model/validation_rmse": jnp.sqrt(state.best_error),
    }
    return eqx.tree_at(lambda w: w.members, world, state.best_members), metrics


def _run(config: Config, budget: Budget, data: FitData, state: FitState) -> FitState:
    """Epochs until every seed has stopped. A GPU works on some seeds side by side while there are enough, so that
    seeds which have stopped are not paid for; the program is compiled once for each width."""
    num_seeds = state.epoch.shape[0]
    for width, least in ((4, 3), (1, 1)) if on_gpu() else ((1, 1),):
        if num_seeds >= least:
            state = jax.lax.while_loop(
                lambda s, least=least: jnp.sum(s.active) >= least,
                lambda s, width=width: _advance(config, budget, data, s, min(width, num_seeds)),
                state,
            )
    return state


def _advance(config: Config, budget: Budget, data: FitData, state: FitState, width: int) -> FitState:
    """Takes `width` seeds, first those that are still fitting, and works on them until one of these stops."""
    num_seeds = state.epoch.shape[0]
    chosen = jnp.argsort(~state.active, stable=True)[:width]
    group_data, group = jax.tree.map(lambda x: x[chosen], (data, state))
    fitting = group.active
    group = jax.lax.while_loop(
        lambda g: jnp.all(g.active == fitting),
        lambda g: jax.vmap(lambda d, one: _epoch(config, budget, d, one))(group_data, g),
        group,
    )
    back = jnp.where(fitting, chosen, num_seeds)  # what lies beyond the last seed is dropped
    return jax.tree.map(lambda all_seeds, some: all_seeds.at[back].set(some, mode="drop"), state, group)


def _prepare(config: Config, budget: Budget, replay: ReplayBuffer, world: WorldModel, key: PRNGKeyArray) -> FitData:
    """Training rows side by side, so that an epoch's minibatches are one look-up. Validation rows: all of them while
    they fit, later one from each of as many equal stretches."""
    room = replays.num_training(replay.rows.reward.shape[0], config.fit.held_out_every)
    rows, weight = replays.take(replay, replays.training_rows(replay, jnp.arange(room)))
    size = config.fit.batches_per_epoch * config.fit.batch_size
    which = spread_out(jr.uniform(key, (size,)), budget.num_rows // config.fit.held_out_every)
    held_out, _ = replays.take(replay, replays.validation_rows(replay, which))
    training, validation = (as_examples(config, world, some) for some in (rows, held_out))
    return FitData(training, weight, validation, reward_noise(config, world))


def spread_out(uniform: Float[Array, " size"], available: int | Int[Array, ""]) -> Int[Array, " size"]:
    """Stratified sample: distinct numbers below `available`, one from each of `size` equal stretches, by `uniform`
    numbers. If there are fewer than `size`, the first `available` entries are all of them and the rest do not
    count."""
    size = uniform.shape[0]
    whole, part = available // size, available % size

    def border(i: Int[Array, " size"]) -> Int[Array, " size"]:
        return i * whole + i * part // size  # i * available // size, without overflow

    i = jnp.arange(size)
    low, high = border(i), border(i + 1)
    drawn = low + (uniform * (high - low)).astype(jnp.int32)
    return jnp.where(whole > 0, jnp.minimum(drawn, high - 1), jnp.minimum(i, available - 1))


def _num_validation(config: Config, budget: Budget) -> Int[Array, ""]:
    size = config.fit.batches_per_epoch * config.fit.batch_size
    return jnp.minimum(budget.num_rows // config.fit.held_out_every, size)


def _begin(config: Config, budget: Budget, data: FitData, members: Dynamics, key: PRNGKeyArray) -> FitState:
    """The first state of a fit: the model as it is, scored, is the one to beat."""
    score, error = _validate(config, budget, data.validation, members)
    zero = jnp.zeros((), jnp.int32)
    return FitState(
        members=members,
        opt_state=begin_optimizer(config, members),
        best_members=members,
        best_score=score,
        best_error=error,
        stale=zero,
        epoch=zero,
        active=jnp.array(True),
        key=key,
    )


def _epoch(config: Config, budget: Budget, data: FitData, state: FitState) -> FitState:
    """Minibatches, validation, and the rule that stops: a paired z-test against the best model so far."""
    key, key_batches = jr.split(state.key)
    num_training = replays.num_training(budget.num_rows, config.fit.held_out_every)

    def draw_examples(key: PRNGKeyArray, shape: tuple[int, int]) -> tuple[Examples, Float[Array, "..."]]:
        which = jr.randint(key, shape, 0, num_training)
        return jax.tree.map(lambda x: x[which], data.training), data.weight[which]

    carry = (state.members, state.opt_state)
    members, opt_state = train_epoch(config, budget, draw_examples, data.reward_noise, carry, key_batches)
    score, error = _validate(config, budget, data.validation, members)
    p = improvement_p(score, state.best_score, _num_validation(config, budget))
    accepted = p < config.fit.accept_p
    stale, epoch = jnp.where(p < config.fit.keep_p, 0, state.stale + 1), state.epoch + 1
    return FitState(
        members=members,
        opt_state=opt_state,
        best_members=_where(accepted, members, state.best_members),
        best_score=jnp.where(accepted, score, state.best_score),
        best_error=jnp.where(accepted, error, state.best_error),
        stale=stale,
        epoch=epoch,
        active=state.active & (stale <= budget.patience) & (epoch < budget.max_epochs),
        key=key,
    )


def _validate(
    config: Config, budget: Budget, examples: Examples, members: Dynamics
) -> tuple[Float[Array, " rows"], Float[Array, ""]]:
    """Score of each validation row (lower is better; 0 beyond the last row) and the mean squared error."""
    size, num_valid = config.fit.batch_size, _num_validation(config, budget)

    def chunk(i: Int[Array, ""], carry: tuple) -> tuple:
        score, error = carry

        part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size), examples)
        inputs = for_each_member(members, part.inputs)
        mean, log_noise = eqx.filter_vmap(lambda member, x: member(x))(members, inputs)
        valid = i * size + jnp.arange(size) < num_valid
        new = jnp.where(valid, row_totals(ensemble_score(mean, log_noise, part.target), part.has_reward), 0.0)
        squared = row_totals(jnp.square(jnp.mean(mean, axis=0) - part.target), part.has_reward) / part.target.shape[-1]
        error = error + jnp.sum(jnp.where(valid, squared, 0.0)) / num_valid
        return jax.lax.dynamic_update_slice_in_dim(score, new, i * size, 0), error

    num_chunks = (num_valid + size - 1) // size
    empty = jnp.zeros(config.fit.batches_per_epoch * size)
    return jax.lax.fori_loop(0, num_chunks, chunk, (empty, jnp.zeros(())))


def improvement_p(
    new: Float[Array, " rows"], best: Float[Array, " rows"], num_rows: Int[Array, ""]
) -> Float[Array, ""]:
    """One-sided p-value of the paired z-test that the new scores are lower, over the first `num_rows` rows."""
    used = jnp.arange(new.shape[0]) < num_rows
    difference = jnp.where(used, new - best, 0.0)
    mean = jnp.sum(difference) / num_rows
    squares = jnp.sum(jnp.where(used, jnp.square(difference - mean), 0.0))
    std = jnp.sqrt(squares / jnp.maximum(num_rows - 1, 1))
    return norm.cdf(mean * jnp.sqrt(num_rows) / jnp.maximum(std, 1e-12))


def _where(condition: Bool[Array, ""], yes, no):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
