import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from doublehorizon.acting.policy import NumpyPolicy, load_policy
from doublehorizon.algorithm.networks import mean_and_std
from doublehorizon.envs.make import describe, make
from doublehorizon.errors import UserError
from doublehorizon.run.progress import begin, fetch_policies
from worlds import TINY, random_actor


def numpy_policy(actor, mean, std, low=(-1.0,), high=(1.0,)) -> NumpyPolicy:
    layers = actor.mlp.layers
    return NumpyPolicy(
        tuple(np.asarray(layer.weight) for layer in layers),
        tuple(np.asarray(layer.bias) for layer in layers),
        np.asarray(mean, np.float32),
        np.asarray(std, np.float32),
        np.asarray(low, np.float32),
        np.asarray(high, np.float32),
    )


def test_the_numpy_policy_is_the_jax_policy():
    actor, rng = random_actor(3, 2), np.random.default_rng(0)
    mean, std = rng.normal(size=3), rng.uniform(0.5, 2.0, 3)
    policy = numpy_policy(actor, mean, std, (-1, -1), (1, 1))
    obs = rng.normal(0, 3, (50, 3)).astype(np.float32)
    centre, spread = mean_and_std(actor(jnp.asarray((obs - mean) / std, jnp.float32)))
    np.testing.assert_allclose(policy.act(obs), np.tanh(centre), rtol=1e-4, atol=1e-5)
    noise = np.random.default_rng(7).standard_normal((50, 2), np.float32)
    sampled = policy.act(obs, noise)
    np.testing.assert_allclose(sampled, np.tanh(centre + spread * noise), rtol=1e-4, atol=1e-5)


def test_the_policies_of_a_run_act_as_its_actors():
    progress = begin(TINY, describe(make("Pendulum-v1")), [0, 1], 40)
    obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    for k, policy in enumerate(fetch_policies(progress.setup, progress.agent)):
        actor = jax.tree.map(lambda x, k=k: x[k], progress.agent.actor_critic.actor)
        np.testing.assert_allclose(
            policy.act(obs), np.tanh(mean_and_std(actor(jnp.asarray(obs)))[0]), rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(policy.predict(obs)[0], 2 * policy.act(obs), atol=1e-6)  # Pendulum's range


def test_actions_come_in_the_environments_range_for_one_observation_or_many():
    policy = numpy_policy(random_actor(3, 1), np.zeros(3), np.ones(3), (1.0,), (5.0,))
    one, state = policy.predict(np.zeros(3))
    assert one.shape == (1,) and state is None
    assert one[0] == pytest.approx(3.0 + 2.0 * policy.act(np.zeros(3, np.float32))[0])
    many, _ = policy.predict(np.full((4, 3), 1e6))
    assert many.shape == (4, 1) and np.all(many >= 1.0) and np.all(many <= 5.0)


def test_a_saved_policy_is_the_same_policy(tmp_path):
    policy = numpy_policy(random_actor(3, 1), np.ones(3), 2 * np.ones(3))
    policy.save(tmp_path / "deep" / "policy.safetensors")
    loaded = load_policy(tmp_path / "deep" / "policy.safetensors")
    obs = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    np.testing.assert_array_equal(loaded.act(obs), policy.act(obs))


def test_a_file_that_is_no_policy_is_refused_in_one_line(tmp_path):
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not a policy at all")
    foreign = tmp_path / "foreign.safetensors"
    save_file({"x": np.zeros(1)}, foreign)
    for path in (broken, foreign, tmp_path / "absent.safetensors", tmp_path):
        with pytest.raises(UserError) as problem:
            load_policy(path)
        assert str(tmp_path) in str(problem.value) and "\n" not in str(problem.value)


def test_an_observation_of_the_wrong_size_is_named():
    policy = numpy_policy(random_actor(3, 1), np.zeros(3), np.ones(3))
    with pytest.raises(UserError, match=r"\(4,\).*3"):
        policy.predict(np.zeros(4))
