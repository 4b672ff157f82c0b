"""Fits the ensemble to the replay, with early stopping inside the compiled program.

`fit` works on all seeds at once, and `_run` and `_advance` have an explicit seed axis: a vmapped `while_loop` would run
every seed until the last one stops. Everything below `_advance` is written for one seed.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, UInt32

from doublehorizon.algorithm import replay_buffer as replays
from doublehorizon.algorithm.kernels import on_gpu
from doublehorizon.algorithm.networks import Dynamics, dropout_seeds
from doublehorizon.algorithm.replay_buffer import ReplayBuffer
from doublehorizon.algorithm.types import Budget, Transition
from doublehorizon.algorithm.world_model import WorldModel, normalized_target
from doublehorizon.config import Config


class Examples(eqx.Module):
    """What the model learns from: normalised inputs (observation, action) and targets (reward, displacement).
    `has_reward` is 0 in steps whose reward comes with the end of an episode and is learnt with it; None: nowhere."""

    inputs: Float[Array, "*lead in"]
    target: Float[Array, "*lead target"]
    has_reward: Float[Array, "*lead"] | None = None


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

    def examples(rows: Transition) -> Examples:
        return Examples(
            jnp.concatenate([world.obs_normalizer.normalize(rows.obs), rows.act], axis=-1),
            normalized_target(world.target_normalizer, rows.obs, rows.reward, rows.next_obs),
            1.0 - rows.terminated if ends_apart else None,
        )

    ends_apart = config.terminator.rewards and world.termination_model is not None

    room = replays.num_training(replay.rows.reward.shape[0], config.fit.held_out_every)
    rows, weight = replays.take(replay, replays.training_rows(replay, jnp.arange(room)))
    size = config.fit.batches_per_epoch * config.fit.batch_size
    which = spread_out(jr.uniform(key, (size,)), budget.num_rows // config.fit.held_out_every)
    held_out, _ = replays.take(replay, replays.validation_rows(replay, which))
    noise = config.model.reward_noise * world.reward_unit(config) / world.target_normalizer.std[0]
    return FitData(examples(rows), weight, examples(held_out), noise)


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
        opt_state=_optimizer(config).init(eqx.filter(members, eqx.is_array)),
        best_members=members,
        best_score=score,
        best_error=error,
        stale=zero,
        epoch=zero,
        active=jnp.array(True),
        key=key,
    )


class Minibatches(eqx.Module):
    """An epoch's minibatches: rows shared by all members, each with its own weights, dropout and reward noise."""

    examples: Examples
    weight: Float[Array, "*lead rows member"]
    noise: Float[Array, "*lead member rows"]
    dropout: UInt32[Array, "*lead member rows"]


def _epoch(config: Config, budget: Budget, data: FitData, state: FitState) -> FitState:
    """Minibatches, validation, and the rule that stops: a paired z-test against the best model so far."""
    key, key_batches = jr.split(state.key)
    batches = _draw(config, budget, data, key_batches)

    def minibatch(i: Int[Array, ""], carry: tuple) -> tuple:
        members, opt_state = carry
        return _gradient_step(config, members, opt_state, jax.tree.map(lambda x: x[i], batches))

    carry = (state.members, state.opt_state)
    members, opt_state = jax.lax.fori_loop(0, budget.fit_batches, minibatch, carry)
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


def _draw(config: Config, budget: Budget, data: FitData, key: PRNGKeyArray) -> Minibatches:
    """All minibatches of an epoch at once: on a GPU a small draw costs as much as a large one."""
    key_rows, key_noise, key_dropout = jr.split(key, 3)
    shape, num_members = (config.fit.batches_per_epoch, config.fit.batch_size), config.model.members
    num_training = replays.num_training(budget.num_rows, config.fit.held_out_every)
    which = jr.randint(key_rows, shape, 0, num_training)
    lead = (shape[0], num_members, shape[1])
    return Minibatches(
        jax.tree.map(lambda x: x[which], data.training),
        data.weight[which],
        data.reward_noise * jr.normal(key_noise, lead),
        dropout_seeds(shape[0] * num_members * shape[1], key_dropout).reshape(lead),
    )


def _gradient_step(
    config: Config, members: Dynamics, opt_state: optax.OptState, batch: Minibatches
) -> tuple[Dynamics, optax.OptState]:
    """One minibatch."""

    def loss(members: Dynamics) -> Float[Array, ""]:
        def member_loss(member, inputs, weight, noise, seeds):
            noisy = batch.examples.target.at[:, 0].add(noise)
            mean, log_noise = member(inputs, seeds)
            terms = negative_log_likelihood(mean, log_noise, noisy, config.model.min_noise)
            return jnp.mean(weight * _total(terms, batch.examples.has_reward))

        inputs = _for_each_member(members, batch.examples.inputs)
        return jnp.sum(eqx.filter_vmap(member_loss)(members, inputs, batch.weight.T, batch.noise, batch.dropout))

    params: Any = members
    updates, opt_state = _optimizer(config).update(jax.grad(loss)(members), opt_state, params)
    return eqx.apply_updates(members, updates), opt_state


def negative_log_likelihood(
    mean: Float[Array, "rows target"],
    log_noise: Float[Array, "noises target"],
    target: Float[Array, "rows target"],
    min_noise: float,
) -> Float[Array, "rows target"]:
    """Of a Gaussian, number by number, without its constant. Below `min_noise` only the logarithm stops falling: the
    gradient that would shrink the noise further vanishes, the one that widens it stays."""
    error = jnp.square(mean - target) * jnp.exp(-2.0 * log_noise)
    return 0.5 * error + jnp.maximum(log_noise, jnp.log(min_noise))


def _total(terms: Float[Array, "rows target"], has_reward: Float[Array, " rows"] | None) -> Float[Array, " rows"]:
    """Sum of each row's terms, the first of which is the reward's."""
    return jnp.sum(terms if has_reward is None else terms.at[:, 0].multiply(has_reward), axis=-1)


def _validate(
    config: Config, budget: Budget, examples: Examples, members: Dynamics
) -> tuple[Float[Array, " rows"], Float[Array, ""]]:
    """Score of each validation row (lower is better; 0 beyond the last row) and the mean squared error."""
    size, num_valid = config.fit.batch_size, _num_validation(config, budget)

    def chunk(i: Int[Array, ""], carry: tuple) -> tuple:
        score, error = carry

        part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size), examples)
        inputs = _for_each_member(members, part.inputs)
        mean, log_noise = eqx.filter_vmap(lambda member, x: member(x))(members, inputs)
        valid = i * size + jnp.arange(size) < num_valid
        new = jnp.where(valid, _total(ensemble_score(mean, log_noise, part.target), part.has_reward), 0.0)
        squared = _total(jnp.square(jnp.mean(mean, axis=0) - part.target), part.has_reward) / part.target.shape[-1]
        error = error + jnp.sum(jnp.where(valid, squared, 0.0)) / num_valid
        return jax.lax.dynamic_update_slice_in_dim(score, new, i * size, 0), error

    num_chunks = (num_valid + size - 1) // size
    empty = jnp.zeros(config.fit.batches_per_epoch * size)
    return jax.lax.fori_loop(0, num_chunks, chunk, (empty, jnp.zeros(())))


def ensemble_score(
    mean: Float[Array, "member rows target"],
    log_noise: Float[Array, "member noises target"],
    target: Float[Array, "rows target"],
) -> Float[Array, "rows target"]:
    """The paper's S_n, number by number: negative log-likelihood of the ensemble taken as one Gaussian, whose variance
    is the members' (geometric) mean noise and their disagreement."""
    variance = jnp.exp(2.0 * jnp.mean(log_noise, axis=0)) + jnp.var(mean, axis=0, ddof=1)
    error = jnp.square(jnp.mean(mean, axis=0) - target)
    return 0.5 * (error / variance + jnp.log(variance))


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


def _for_each_member(members: Dynamics, inputs: Float[Array, "rows in"]) -> Float[Array, "member rows in"]:
    """The same rows once per member. With shared rows XLA puts the member axis second in the product, and turns all
    of it around afterwards."""
    return jnp.broadcast_to(inputs[None], (members.log_noise.shape[0], *inputs.shape))


def _optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW with a decay per layer. The decay is a tree like the parameters, which optax's own AdamW has not."""

    def add_decay(update: Any, members: Any) -> Any:
        decay = eqx.tree_at(
            lambda d: d.log_noise,
            jax.tree.map(lambda _: 0.0, members),
            config.model.noise_decay,
        )
        for i, rate in enumerate(config.model.weight_decay):
            decay = eqx.tree_at(lambda d, i=i: (d.mlp.layers[i].weight, d.mlp.layers[i].bias), decay, (rate, rate))
        return jax.tree.map(lambda u, d, m: u + d * m, update, decay, members)

    return optax.chain(optax.scale_by_adam(), optax.stateless(add_decay), optax.scale(-config.fit.learning_rate))


def _where(condition: Bool[Array, ""], yes, no):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
