"""Learns which steps end an episode, where no rule is known, and what reward comes with an end.

A small ensemble of its own, beside the dynamics model and outside its early-stopping score. Steps that end an episode
are rare, one in hundreds, so half of every minibatch is drawn from them; the odds are put right again afterwards.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from doublehorizon.algorithm import replay_buffer as replays
from doublehorizon.algorithm.end_rewards import EndRewards
from doublehorizon.algorithm.ensemble import ensemble
from doublehorizon.algorithm.networks import TerminationClassifier
from doublehorizon.algorithm.normalizer import Normalizer
from doublehorizon.algorithm.replay_buffer import ReplayBuffer
from doublehorizon.algorithm.types import Budget, Transition
from doublehorizon.config import TerminatorConfig
from doublehorizon.schedule import Number

_CHECKED_ROWS = 16_384  # rows, at most, on which precision and recall are counted


class TerminationModel(eqx.Module):
    """Classifiers (leading member axis) of steps that end their episode. Their logits are those of the minibatches, in
    which ends are frequent; `log_odds` is what must be added, and minus infinity before the first end was seen."""

    members: TerminationClassifier
    log_odds: Float[Array, ""]

    def predict(
        self,
        normalizer: Normalizer,
        obs: Float[Array, "rows obs"],
        act: Float[Array, "rows act"],
        next_obs: Float[Array, "rows obs"],
    ) -> tuple[Float[Array, " rows"], Float[Array, " rows"] | None]:
        """That a step ends its episode, and the normalised reward that it then brings, if that is learnt: the members'
        means."""
        inputs = _inputs(normalizer, obs, act, next_obs)
        outputs = eqx.filter_vmap(lambda member: member(inputs))(self.members)
        probability = jnp.mean(jax.nn.sigmoid(outputs[..., 0] + self.log_odds), axis=0)
        return probability, jnp.mean(outputs[..., 1], axis=0) if outputs.shape[-1] > 1 else None


def untrained_termination_model(
    config: TerminatorConfig, obs_size: int, act_size: int, key: PRNGKeyArray
) -> TerminationModel:
    """Says of every step that it does not end the episode."""
    members = ensemble(lambda key: TerminationClassifier(config, obs_size, act_size, key), config.members, key)
    return TerminationModel(members, jnp.asarray(-jnp.inf, jnp.float32))


def fit_termination_model(
    config: TerminatorConfig,
    holds_out: bool,
    budget: Budget,
    model: TerminationModel,
    normalizer: Normalizer,
    end_rewards: EndRewards | None,
    replay: ReplayBuffer,
    key: PRNGKeyArray,
) -> tuple[TerminationModel, dict[str, Float[Array, ""]]]:
    """Trains the ensemble of one seed on its replay, for a fixed number of minibatches; without an end in it, nothing
    changes. As the model does, it leaves out the rows that are held out (`holds_out`), or learns from all: the first
    prize of a kind may be the only one for thousands of steps. The key is consumed."""
    capacity = replay.rows.reward.shape[0]
    group_size = capacity // replay.held_out.shape[0]
    num_training = replays.num_training(budget.num_rows, group_size) if holds_out else jnp.asarray(budget.num_rows)
    which = jnp.arange(replays.num_training(capacity, group_size) if holds_out else capacity)
    used = replays.training_rows(replay, which) if holds_out else which
    ended = replay.rows.terminated[used] * (which < num_training)
    rank = jnp.cumsum(ended > 0)  # of each end among them, so that the k-th is found by bisection
    num_ends = rank[-1]
    optimizer = optax.adam(config.learning_rate)

    def loss(members: TerminationClassifier, key: PRNGKeyArray) -> Float[Array, ""]:
        """Each member sees its own rows: half of them ends, half drawn from all rows."""
        key_ends, key_any = jr.split(key)
        shape = (config.members, config.batch_size // 2)
        ends = jnp.searchsorted(rank, 1 + jr.randint(key_ends, shape, 0, jnp.maximum(num_ends, 1)))
        chosen = jnp.concatenate([ends, jr.randint(key_any, shape, 0, num_training)], axis=1)
        rows, _ = replays.take(replay, used[chosen.ravel()])
        inputs = _inputs(normalizer, rows.obs, rows.act, rows.next_obs).reshape(*chosen.shape, -1)
        outputs = eqx.filter_vmap(lambda member, x: member(x))(members, inputs)
        labels = rows.terminated.reshape(chosen.shape)
        total = jnp.sum(jnp.mean(optax.sigmoid_binary_cross_entropy(outputs[..., 0], labels), axis=1))
        if not config.rewards or end_rewards is None:
            return total
        reward = end_rewards.normalizer.normalize(rows.reward[:, None]).reshape(chosen.shape)
        return total + 0.1 * jnp.sum(jnp.mean(labels * jnp.square(outputs[..., 1] - reward), axis=1))

    def minibatch(i: Int[Array, ""], carry: tuple) -> tuple:
        members, opt_state = carry
        updates, opt_state = optimizer.update(jax.grad(loss)(members, jr.fold_in(key, i)), opt_state)
        members = eqx.apply_updates(members, updates)
        return _shrink_input_weights(members, config.learning_rate * config.sparsity), opt_state

    first = (model.members, optimizer.init(eqx.filter(model.members, eqx.is_array)))
    members, _ = jax.lax.fori_loop(0, jnp.where(num_ends > 0, budget.termination_batches, 0), minibatch, first)
    share = num_ends / num_training
    # half of a minibatch are ends, and so is this share of the other half: its odds are (1 + share) / share times the
    # true ones
    fitted = TerminationModel(members, jnp.log(share) - jnp.log1p(share))
    if holds_out:
        return fitted, _precision_and_recall(fitted, normalizer, *_newest_held_out(replay, budget))
    return fitted, _precision_and_recall(model, normalizer, *_newest(replay, budget))


def _shrink_input_weights(members: TerminationClassifier, by: Number) -> TerminationClassifier:
    """Soft thresholding (an L1 penalty): weights of the inputs move towards 0, and stay there until their gradient is
    the stronger."""
    weight = members.mlp.layers[0].weight
    smaller = jnp.sign(weight) * jnp.maximum(jnp.abs(weight) - by, 0.0)
    return eqx.tree_at(lambda m: m.mlp.layers[0].weight, members, smaller)


def _newest_held_out(replay: ReplayBuffer, budget: Budget) -> tuple[Transition, Bool[Array, " rows"]]:
    """The newest rows that were held out, and which of them there are: they are from where the policy goes now."""
    num_groups = replay.held_out.shape[0]
    group_size = replay.rows.reward.shape[0] // num_groups
    newest_first = jnp.arange(min(_CHECKED_ROWS, num_groups))
    which = (replay.position // group_size - 1 - newest_first) % num_groups
    rows, _ = replays.take(replay, replays.validation_rows(replay, which))
    return rows, newest_first < budget.num_rows // group_size


def _newest(replay: ReplayBuffer, budget: Budget) -> tuple[Transition, Bool[Array, " rows"]]:
    """The rows that came since the last fit, which therefore has not seen them; none before the first."""
    age = jnp.arange(min(_CHECKED_ROWS, replay.rows.reward.shape[0]))
    rows, _ = replays.take(replay, replays.rows_of_age(replay, age, budget.num_rows))
    return rows, (age < budget.num_new) & (budget.num_new < budget.num_rows)


def _precision_and_recall(
    model: TerminationModel, normalizer: Normalizer, rows: Transition, counted: Bool[Array, " rows"]
) -> dict[str, Float[Array, ""]]:
    """Precision and recall of predicted ends on the rows that count. Not a number where there are none."""
    probability, _ = model.predict(normalizer, rows.obs, rows.act, rows.next_obs)
    predicted = counted & (probability > 0.5)
    ended = counted & (rows.terminated > 0)
    both = jnp.sum(predicted & ended)
    return {"termination/precision": both / jnp.sum(predicted), "termination/recall": both / jnp.sum(ended)}


def _inputs(
    normalizer: Normalizer,
    obs: Float[Array, "rows obs"],
    act: Float[Array, "rows act"],
    next_obs: Float[Array, "rows obs"],
) -> Float[Array, "rows in"]:
    return jnp.concatenate([normalizer.normalize(obs), act, normalizer.normalize(next_obs)], axis=-1)
