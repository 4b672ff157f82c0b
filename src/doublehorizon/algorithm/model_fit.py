"""Fits the ensemble to the replay a little, after every few new steps: a fixed number of minibatches, drawn from all
rows. What is written here for one minibatch also serves fits that stop early (`early_stopping`)."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray, UInt32

from doublehorizon.algorithm import replay_buffer as replays
from doublehorizon.algorithm.networks import Dynamics, dropout_seeds
from doublehorizon.algorithm.replay_buffer import ReplayBuffer
from doublehorizon.algorithm.types import Budget, Transition
from doublehorizon.algorithm.world_model import WorldModel, normalized_target
from doublehorizon.config import Config

_RECENT = 5  # one row in this many, the newest ones, counts as recent


class Examples(eqx.Module):
    """What the model learns from: normalised inputs (observation, action) and targets (reward, displacement).
    `has_reward` is 0 in steps whose reward comes with the end of an episode and is learnt with it; None: nowhere."""

    inputs: Float[Array, "*lead in"]
    target: Float[Array, "*lead target"]
    has_reward: Float[Array, "*lead"] | None = None


DrawExamples = Callable[[PRNGKeyArray, tuple[int, int]], tuple[Examples, Float[Array, "..."] | None]]
"""From a key and a shape, batches and rows, to examples of that shape, and to how much each counts for each member, if
not the same."""


def fit(
    config: Config, budget: Budget, replay: ReplayBuffer, world: WorldModel, key: Key[Array, " seed"]
) -> tuple[WorldModel, dict[str, Array]]:
    """Fits every seed's ensemble for as many epochs as there are. All arguments but `config` and `budget` have a
    leading seed axis; the keys are consumed."""

    def one_seed(replay: ReplayBuffer, world: WorldModel, key: PRNGKeyArray) -> tuple[Dynamics, dict]:
        noise = reward_noise(config, world)

        def draw_examples(key: PRNGKeyArray, shape: tuple[int, int]) -> tuple[Examples, None]:
            which = _rows_by_age(config, budget, replay, jr.uniform(key, shape))
            rows = jax.tree.map(lambda x: x[which.ravel()], replay.rows)
            return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), as_examples(config, world, rows)), None

        def epoch(i: Int[Array, ""], carry: tuple) -> tuple:
            return train_epoch(config, budget, draw_examples, noise, carry, jr.fold_in(key, i))

        carry = (world.members, begin_optimizer(config, world.members))
        members, _ = jax.lax.fori_loop(0, budget.max_epochs, epoch, carry)
        return members, _next_rows_error(config, budget, replay, world)

    members, metrics = jax.vmap(one_seed)(replay, world, key)
    metrics = {"model/epochs": jnp.full(key.shape, budget.max_epochs)} | metrics
    return eqx.tree_at(lambda w: w.members, world, members), metrics


def _rows_by_age(
    config: Config, budget: Budget, replay: ReplayBuffer, uniform: Float[Array, "*lead rows"]
) -> Int[Array, "*lead rows"]:
    """Positions of the rows of minibatches by `uniform` numbers: the first of each minibatch among the newest rows, the
    others among all."""
    num_recent = round(config.fit.recent_share * uniform.shape[-1])
    reach = jnp.where(jnp.arange(uniform.shape[-1]) < num_recent, budget.num_rows / _RECENT, budget.num_rows)
    age = (uniform * jnp.broadcast_to(reach, uniform.shape)).astype(jnp.int32)  # up to 2^23 rows, each can be drawn
    return replays.rows_of_age(replay, age, budget.num_rows)


def _next_rows_error(
    config: Config, budget: Budget, replay: ReplayBuffer, world: WorldModel
) -> dict[str, Float[Array, ""]]:
    """How well the model predicts what came after its last fit, at most a minibatch of it, before it is trained on
    that. Not a number in the first fit."""
    ages = jnp.arange(config.fit.batch_size)
    rows, _ = replays.take(replay, replays.rows_of_age(replay, ages, budget.num_rows))
    newest = as_examples(config, world, rows)
    mean, log_noise = eqx.filter_vmap(lambda m, x: m(x))(world.members, for_each_member(world.members, newest.inputs))
    score = row_totals(ensemble_score(mean, log_noise, newest.target), newest.has_reward)

    def rmse(error: Float[Array, "rows target"]) -> Float[Array, ""]:
        squared = row_totals(jnp.square(error), newest.has_reward) / newest.target.shape[-1]
        return jnp.sqrt(jnp.mean(squared, where=counted))

    counted = (ages < budget.num_new) & (budget.num_new < budget.num_rows)
    return {
        "model/validation_score": jnp.mean(score, where=counted),
        "model/validation_rmse": rmse(jnp.mean(mean, axis=0) - newest.target),
        "model/member_rmse": jnp.sqrt(jnp.mean(jnp.square(jax.vmap(lambda m: rmse(m - newest.target))(mean)))),
    }


def as_examples(config: Config, world: WorldModel, rows: Transition) -> Examples:
    """Rows as the model sees them."""
    return Examples(
        jnp.concatenate([world.obs_normalizer.normalize(rows.obs), rows.act], axis=-1),
        normalized_target(world.target_normalizer, rows.obs, rows.reward, rows.next_obs),
        1.0 - rows.terminated if world.learns_end_rewards(config) else None,
    )


def reward_noise(config: Config, world: WorldModel) -> Float[Array, ""]:
    """Scale of the noise on the training target of the reward, normalised as that is."""
    return config.model.reward_noise * world.reward_spread(config) / world.target_normalizer.std[0]


class Minibatches(eqx.Module):
    """An epoch's minibatches: rows shared by all members, each with its own dropout and reward noise, and
    where rows have weights, its own."""

    examples: Examples
    weight: Float[Array, "*lead rows member"] | None
    noise: Float[Array, "*lead member rows"]
    dropout: UInt32[Array, "*lead member rows"]


def train_epoch(
    config: Config,
    budget: Budget,
    draw_examples: DrawExamples,
    reward_noise: Float[Array, ""],
    carry: tuple[Dynamics, optax.OptState],
    key: PRNGKeyArray,
) -> tuple[Dynamics, optax.OptState]:
    """An epoch's minibatches. The key is consumed."""
    batches = _draw(config, draw_examples, reward_noise, key)

    def minibatch(i: Int[Array, ""], carry: tuple) -> tuple:
        members, opt_state = carry
        return _gradient_step(config, members, opt_state, jax.tree.map(lambda x: x[i], batches))

    return jax.lax.fori_loop(0, budget.fit_batches, minibatch, carry)


def _draw(
    config: Config, draw_examples: DrawExamples, reward_noise: Float[Array, ""], key: PRNGKeyArray
) -> Minibatches:
    """All minibatches of an epoch at once: on a GPU a small draw costs as much as a large one."""
    key_rows, key_noise, key_dropout = jr.split(key, 3)
    shape, num_members = (config.fit.batches_per_epoch, config.fit.batch_size), config.model.members
    examples, weight = draw_examples(key_rows, shape)
    lead = (shape[0], num_members, shape[1])
    return Minibatches(
        examples,
        weight,
        reward_noise * jr.normal(key_noise, lead),
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
            total = row_totals(terms, batch.examples.has_reward)
            return jnp.mean(total if weight is None else weight * total)

        inputs = for_each_member(members, batch.examples.inputs)
        weight = None if batch.weight is None else batch.weight.T
        return jnp.sum(eqx.filter_vmap(member_loss)(members, inputs, weight, batch.noise, batch.dropout))

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


def row_totals(terms: Float[Array, "rows target"], has_reward: Float[Array, " rows"] | None) -> Float[Array, " rows"]:
    """Sum of each row's terms, the first of which is the reward's."""
    return jnp.sum(terms if has_reward is None else terms.at[:, 0].multiply(has_reward), axis=-1)


def ensemble_score(
    mean: Float[Array, "member rows target"],
    log_noise: Float[Array, "member noises target"],
    target: Float[Array, "rows target"],
) -> Float[Array, "rows target"]:
    """The paper's S_n per dimension: negative log-likelihood of the ensemble taken as one Gaussian."""
    middle, variance = as_one_gaussian(mean, log_noise)
    error = jnp.square(middle - target)
    return 0.5 * (error / variance + jnp.log(variance))


def as_one_gaussian(
    mean: Float[Array, "member rows target"], log_noise: Float[Array, "member noises target"]
) -> tuple[Float[Array, "rows target"], Float[Array, "rows target"]]:
    """The ensemble's mean, and its variance: the members' (geometric) mean noise and their disagreement."""
    variance = jnp.exp(2.0 * jnp.mean(log_noise, axis=0)) + jnp.var(mean, axis=0, ddof=1)
    return jnp.mean(mean, axis=0), variance


def for_each_member(members: Dynamics, inputs: Float[Array, "rows in"]) -> Float[Array, "member rows in"]:
    """The same rows once per member. With shared rows XLA puts the member axis second in the product, and turns all
    of it around afterwards."""
    return jnp.broadcast_to(inputs[None], (members.log_noise.shape[0], *inputs.shape))


def begin_optimizer(config: Config, members: Dynamics) -> optax.OptState:
    """AdamW that has seen nothing yet."""
    return _optimizer(config).init(eqx.filter(members, eqx.is_array))


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
