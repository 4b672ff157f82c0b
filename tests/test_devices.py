"""Seeds spread over devices: four simulated ones, which JAX must be told of before it starts."""

import os
import subprocess
import sys
import threading
import time

import jax
import pytest

from doublehorizon.algorithm.devices import Background, find_devices
from doublehorizon.errors import UserError

SCRIPT = """
import jax, numpy as np
jax.config.update("jax_disable_most_optimizations", True)
import doublehorizon as dh
from worlds import TINY

def learnt(seeds, seed=0):
    model = dh.DHMBPO("Pendulum-v1", seed=seed, seeds=seeds, config=TINY)
    model.learn(80)
    return model

spread = learnt(4)
weights = spread._progress.agent.actor_critic.actor.mlp.layers[0].weight
assert len(weights.sharding.device_set) == 4, weights.sharding
assert weights.addressable_shards[2].data.shape[0] == 1
alone = learnt(1, seed=2)
assert len(alone._progress.agent.actor_critic.actor.mlp.layers[0].weight.sharding.device_set) == 1
assert len(learnt(6).devices) == 3
np.testing.assert_allclose(spread.policies[2].weights[0], alone.policies[0].weights[0], rtol=1e-2, atol=1e-3)
spread.save("saved")
again = dh.DHMBPO.load("saved")
again.learn(40)
assert len(again._progress.agent.actor_critic.actor.mlp.layers[0].weight.sharding.device_set) == 4
"""


@pytest.mark.slow
def test_seeds_are_spread_over_all_devices_and_learn_as_they_would_alone(tmp_path):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    env = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.path.dirname(__file__), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_device_that_is_not_there_is_named(monkeypatch):
    def no_such_device(backend=None):
        raise RuntimeError(f"unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", no_such_device)
    with pytest.raises(UserError, match=r"device is 'gpu', but JAX sees no such device"):
        find_devices("gpu", 1)
    with pytest.raises(UserError, match=r"device is 'tpu', but it must be cpu, gpu or auto"):
        find_devices("tpu", 1)


def test_no_more_devices_are_used_than_share_the_seeds_out(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: list(range(8)))
    assert [len(find_devices(None, n)) for n in (1, 4, 6, 7, 8, 9, 16, 20)] == [1, 4, 6, 7, 8, 3, 8, 5]


def test_background_work_hands_over_its_result_or_its_error():
    assert Background(lambda: 7).result() == 7
    with pytest.raises(ZeroDivisionError):
        Background(lambda: 1 / 0).result()


def test_background_work_does_not_wait():
    gate, begun = threading.Event(), time.monotonic()
    slow = Background(lambda: gate.wait(60))
    assert time.monotonic() - begun < 10
    gate.set()
    assert slow.result() is True
