"""One update of critics, actor and temperature, against gradients taken in another way."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from doublehorizon.algorithm.actor_critic import ActorCritic, critic_values, untrained_actor_critic
from doublehorizon.algorithm.model_buffer import ModelBuffer, States
from doublehorizon.algorithm.networks import Critic
from doublehorizon.algorithm.normalizer import Normalizer
from doublehorizon.algorithm.rollouts import no_perturbations, training_rollout
from doublehorizon.algorithm.start_states import StartStates
from doublehorizon.algorithm.types import Rollout, Task
from doublehorizon.algorithm.updates import (
    UpdateContext,
    actor_gradient,
    actor_gradient_norm,
    actor_objective,
    critic_target,
    draw_inputs,
    fresh_opt_states,
    joint_update,
)
from doublehorizon.algorithm.values import Bounds, update_bounds
from doublehorizon.config_json import changed
from worlds import TINY, random_world

# so that critics before and after an update differ, and so does what they say under dropout
CONFIG = changed(TINY, {"policy.learning_rate": 0.01, "critic.dropout": 0.2})
TASK = Task(3, 2, lambda obs: obs[..., 0] > 1.0)
NORMALIZER = Normalizer(jnp.array([0.1, -0.2, 0.3]), jnp.array([0.5, 2.0, 1.5]))
UNIT = 2.5  # of the reward
WORLD = replace(
    random_world(3, 2, CONFIG.model.members),
    obs_normalizer=NORMALIZER,
    target_normalizer=Normalizer(jnp.zeros(4), jnp.array([UNIT, 1.0, 1.0, 1.0])),
)
CONTEXT = UpdateContext(CONFIG, TASK, WORLD)


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))]


@eqx.filter_jit
def learnt() -> ActorCritic:
    """As if it had learnt: critics that differ, targets behind them, known bounds."""
    fresh = untrained_actor_critic(CONFIG, TASK, jr.key(1), jr.key(2))

    def moved(networks, scale, seed):
        parts, structure = jax.tree.flatten(networks)
        keys = jr.split(jr.key(seed), len(parts))
        return structure.unflatten([x + scale * jr.normal(k, x.shape) for x, k in zip(parts, keys, strict=True)])

    bounds = Bounds(jnp.array(-2.0), jnp.array(3.0), jnp.array(True))
    critics, targets = moved(fresh.critics, 0.3, 3), moved(fresh.critics, 0.3, 4)
    return replace(fresh, critics=critics, target_critics=targets, bounds=bounds)


@pytest.fixture(scope="module")
def update():
    """What goes into a joint update, and what comes out."""
    before = learnt()
    buffer = ModelBuffer(States(0.3 * jr.normal(jr.key(5), (50, 3))), jnp.array(0), jnp.array(50))
    inputs = draw_inputs(CONTEXT, StartStates(None, buffer), jr.key(6))
    after, opt_states, metrics = eqx.filter_jit(joint_update)(CONTEXT, before, fresh_opt_states(CONFIG, before), inputs)
    return before, inputs, after, opt_states, metrics


@eqx.filter_jit
def rolled(actor, inputs) -> Rollout:
    perturbations = no_perturbations(TASK, inputs.noise)
    return training_rollout(TASK, CONTEXT.world, actor, inputs.start.obs, inputs.noise, perturbations)


def values(critics, obs, act, seeds=None) -> jax.Array:
    """Every critic's raw output, one after the other."""
    inputs = jnp.concatenate([(obs - NORMALIZER.mean[None]) / NORMALIZER.std[None], act], axis=-1)
    each = [jax.tree.map(lambda x, k=k: x[k], critics) for k in range(CONFIG.critic.members)]
    return jnp.stack([c(inputs) if seeds is None else c(inputs, seeds[k]) for k, c in enumerate(each)])


def expanded(rollout: Rollout, last_q, temperature, first_bonus: bool):
    """Eq. 7, or Eq. 9 without the first action's bonus, from the last step to the first."""
    horizon = rollout.reward.shape[0]
    total = rollout.alive[horizon] * (last_q - temperature * rollout.log_prob[horizon])
    for t in reversed(range(horizon)):
        bonus = temperature * rollout.log_prob[t] if t > 0 or first_bonus else 0.0
        total = rollout.alive[t] * (rollout.reward[t] - bonus) + CONFIG.policy.discount * total
    return total


def scaled(raw, bounds: Bounds):
    return 0.5 * (bounds.high - bounds.low) * raw + 0.5 * (bounds.high + bounds.low)


def first_gradient(opt_state) -> list[np.ndarray]:
    """Adam's first moment after one step is a tenth of the gradient."""
    return [10.0 * x for x in leaves(optax.tree_utils.tree_get(opt_state, "mu"))]


def assert_close(ours: list[np.ndarray], theirs: list[np.ndarray], scale: float = 1e-4) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=scale * max(1e-3, np.abs(b).max()))


def test_some_rows_end_and_some_do_not(update):
    before, inputs, *_, metrics = update
    alive = float(jnp.mean(rolled(before.actor, inputs).alive[-1]))
    assert 0 < alive < 1  # so that the tests below see both
    assert float(metrics["model/rollout_alive"]) == pytest.approx(alive)


def test_the_actor_follows_critics_that_are_already_updated(update):
    before, inputs, after, opt_states, metrics = update

    def loss(actor, critics, bounds):
        rollout = rolled(actor, inputs)
        last_q = jnp.mean(scaled(values(critics, rollout.obs[-1], rollout.act[-1]), bounds), axis=0)
        return -jnp.mean(expanded(rollout, last_q, UNIT * jnp.exp(before.log_temperature), first_bonus=True))

    slope = eqx.filter_jit(jax.value_and_grad(loss))
    value, gradient = slope(before.actor, after.critics, after.bounds)
    assert_close(first_gradient(opt_states.actor), [x / UNIT for x in leaves(gradient)])
    np.testing.assert_allclose(metrics["train/actor_loss"], value, rtol=1e-4)
    _, stale = slope(before.actor, before.critics, after.bounds)
    apart = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(leaves(gradient), leaves(stale), strict=True)]
    assert min(apart) > 1e-2  # ten times what the comparison above allows
    # Adam's first step goes against the gradient, as far as the learning rate
    for old, new, slope in zip(leaves(before.actor), leaves(after.actor), leaves(gradient), strict=True):
        steep = np.abs(slope) > 1e-2 * np.abs(slope).max()
        np.testing.assert_allclose((new - old)[steep], -0.01 * np.sign(slope)[steep], rtol=1e-2)


def test_the_actors_gradient_is_that_through_the_whole_rollout(update):
    before, inputs, *_ = update
    perturbations = no_perturbations(TASK, inputs.noise)

    def roll(perturbations):
        start, noise = inputs.start.obs, inputs.noise
        return training_rollout(TASK, CONTEXT.world, before.actor, start, noise, perturbations)

    @jax.jit
    def through_perturbations():
        rollout, pull_back = jax.vjp(roll, perturbations)
        cotangents = jax.grad(lambda rollout: actor_objective(CONTEXT, before, rollout))(rollout)
        return actor_gradient(CONTEXT, before.actor, rollout.obs, *pull_back(cotangents))

    ours = through_perturbations()
    objective = lambda actor: actor_objective(CONTEXT, before, rolled(actor, inputs))  # noqa: E731
    directly = eqx.filter_jit(jax.grad(objective))(before.actor)
    assert_close(leaves(ours), leaves(directly))
    assert all(np.abs(x).max() > 1e-5 for x in leaves(directly))


def test_the_critics_step_towards_the_expanded_value(update):
    before, inputs, after, opt_states, metrics = update
    rollout = rolled(before.actor, inputs)

    @jax.jit
    def targets():
        temperature, discount = UNIT * jnp.exp(before.log_temperature), CONFIG.policy.discount
        bounds = update_bounds(CONFIG.critic, discount, True, before.bounds, rollout, temperature)
        last = values(before.target_critics, rollout.obs[-1], rollout.act[-1])[inputs.target_indices]
        least = jnp.clip(jnp.min(scaled(last, bounds), axis=0), bounds.low, bounds.high)
        return bounds, expanded(rollout, least, temperature, first_bonus=False)

    bounds, total = targets()

    def loss(critics):
        q = scaled(values(critics, rollout.obs[0], rollout.act[0], inputs.dropout_seeds), bounds)
        return jnp.sum(jnp.mean(jnp.square(q - total[None]), axis=1))

    value, gradient = eqx.filter_jit(jax.value_and_grad(loss))(before.critics)
    assert_close(first_gradient(opt_states.critics), [x / UNIT**2 for x in leaves(gradient)])
    np.testing.assert_allclose(metrics["train/critic_loss"], value / CONFIG.critic.members, rtol=1e-4)
    np.testing.assert_allclose(metrics["train/q_target"], total.mean(), rtol=1e-4)
    np.testing.assert_allclose([after.bounds.low, after.bounds.high], [bounds.low, bounds.high], rtol=1e-6)
    assert float(bounds.low) != float(before.bounds.low)
    np.testing.assert_allclose(
        critic_target(CONTEXT, replace(before, bounds=bounds), rollout, inputs.target_indices),
        total,
        rtol=1e-3,
        atol=1e-4,
    )


def test_critics_see_observations_first_and_drop_units_only_when_asked():
    class First(Critic):
        scale: jax.Array

        def __init__(self):
            self.mlp, self.scale = None, jnp.ones(())  # type: ignore[assignment]

        def __call__(self, inputs, seeds=None):
            return self.scale * inputs[:, 0] + (0.0 if seeds is None else seeds.astype(jnp.float32))

    obs, act = jnp.array([[1.0, 2.0]]), jnp.array([[3.0]])
    one = jax.tree.map(lambda x: x[None], First())
    assert critic_values(one, obs, act).tolist() == [[1.0]]
    assert critic_values(one, obs, act, jnp.array([[10]], jnp.uint32)).tolist() == [[11.0]]


def test_target_critics_follow_slowly(update):
    before, _, after, *_ = update
    rate = CONFIG.critic.target_rate
    parts = (before.target_critics, after.critics, after.target_critics)
    for old, new, target in zip(*map(leaves, parts), strict=True):
        np.testing.assert_allclose(target, (1 - rate) * old + rate * new, atol=1e-6)


def test_entropy_above_its_target_lowers_the_temperature(update):
    before, inputs, after, opt_states, metrics = update
    entropy = -float(jnp.mean(rolled(before.actor, inputs).log_prob[0]))
    surplus = entropy - CONFIG.policy.target_entropy_per_action * TASK.act_size
    assert surplus > 0 and float(after.log_temperature) < float(before.log_temperature)
    (gradient,) = first_gradient(opt_states.temperature)
    np.testing.assert_allclose(gradient, np.exp(before.log_temperature) * surplus, rtol=1e-4)
    np.testing.assert_allclose(metrics["train/entropy"], entropy, rtol=1e-4)
    np.testing.assert_allclose(metrics["train/ent_coef"], np.exp(before.log_temperature), rtol=1e-5)
    assert float(metrics["train/reward_unit"]) == UNIT


def test_the_norm_of_the_actors_gradient_is_that_of_adams_mean(update):
    *_, opt_states, _ = update
    flat = np.concatenate([x.ravel() for x in first_gradient(opt_states.actor)]) / 10.0
    np.testing.assert_allclose(actor_gradient_norm(opt_states), np.linalg.norm(flat), rtol=1e-4)


def test_inputs_of_an_update_are_drawn_apart():
    """No two draws are the same, each target critic is chosen equally often, and dropout differs between critics."""
    buffer = ModelBuffer(States(jnp.arange(50.0)[:, None] * jnp.ones((1, 3))), jnp.array(0), jnp.array(50))
    keys = jr.split(jr.key(0), 600)
    many = jax.vmap(lambda key: draw_inputs(CONTEXT, StartStates(None, buffer), key))(keys)
    chosen = np.asarray(many.target_indices)
    assert chosen.shape == (600, 2) and np.all(chosen[:, 0] != chosen[:, 1])
    assert np.all(np.abs(np.bincount(chosen.ravel()) - 400) < 60)
    assert len(np.unique(np.asarray(many.dropout_seeds[0]))) == 3 * CONFIG.policy.batch_size
    assert (
        abs(np.corrcoef(np.asarray(many.next_act_noise).ravel(), np.asarray(many.noise.act[:, 0]).ravel())[0, 1]) < 0.05
    )
