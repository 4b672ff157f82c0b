"""What `bench` counts, against XLA's own count, and that it runs from end to end."""

import json

import jax
import jax.numpy as jnp
import pytest

from doublehorizon import presets
from doublehorizon.algorithm import kernels, rollouts
from doublehorizon.algorithm.agent import initial_state
from doublehorizon.algorithm.model_fit import Examples, Minibatches, _gradient_step, _optimizer
from doublehorizon.algorithm.start_states import StartStates
from doublehorizon.algorithm.types import Task
from doublehorizon.algorithm.updates import (
    UpdateContext,
    critic_only_update,
    draw_inputs,
    fresh_opt_states,
    joint_update,
)
from doublehorizon.analysis import speed
from doublehorizon.config import Config, CriticConfig, FitConfig, Horizons, ModelConfig, PolicyConfig

WIDE = Config(  # so wide that products are nearly all of the work
    horizons=Horizons(training=2),
    model=ModelConfig(members=2, width=256),
    fit=FitConfig(batch_size=128),
    critic=CriticConfig(members=2, width=256),
    policy=PolicyConfig(width=256, batch_size=128),
)
TASK = Task(17, 6, None)


def counted(function, *arguments) -> float:
    return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("joint", [True, False])
def test_the_operations_of_an_update_are_those_that_xla_counts(monkeypatch, joint):
    monkeypatch.setattr(rollouts, "on_gpu", lambda: True)  # unrolled: XLA counts a loop's body once
    state = initial_state(WIDE, TASK, jnp.asarray(0))
    context = UpdateContext(WIDE, TASK, state.world)
    inputs = draw_inputs(context, StartStates(state.model_buffer, state.model_buffer), state.key)
    update = joint_update if joint else critic_only_update
    opt_states = fresh_opt_states(WIDE, state.actor_critic)
    found = counted(lambda a, o: update(context, a, o, inputs)[:2], state.actor_critic, opt_states)
    assert speed.update_needs(WIDE, TASK, joint)[0] == pytest.approx(found, rel=0.12)


def test_the_operations_of_an_epoch_are_those_that_xla_counts():
    state = initial_state(WIDE, TASK, jnp.asarray(0))
    rows, members = WIDE.fit.batch_size, WIDE.model.members
    examples = Examples(jnp.ones((rows, 23)), jnp.ones((rows, 18)))
    noise, seeds = jnp.ones((members, rows)), jnp.ones((members, rows), jnp.uint32)
    batch = Minibatches(examples, jnp.ones((rows, members)), noise, seeds)
    model = state.world.members
    found = counted(lambda m, o: _gradient_step(WIDE, m, o, batch), model, _optimizer(WIDE).init(model))
    assert speed.epoch_needs(WIDE, TASK, 1, 0)[0] == pytest.approx(found, rel=0.12)


def test_sixteen_bits_halve_the_bytes_of_hidden_layers(monkeypatch):
    cpu = speed.epoch_needs(WIDE, TASK, 6, 0)[1]
    monkeypatch.setattr(kernels, "interpret", True)
    weights = 7 * 4 * speed.weights_of(WIDE, TASK)["model"] * 6 * WIDE.model.members
    assert speed.epoch_needs(WIDE, TASK, 6, 0)[1] - weights == pytest.approx(0.5 * (cpu - weights))


@pytest.mark.slow
def test_bench_measures_and_compares(monkeypatch, tmp_path, capsys):
    from doublehorizon.cli import bench
    from worlds import TINY

    monkeypatch.setitem(presets.PRESETS, "quick", TINY)
    monkeypatch.setattr(speed, "STEPS", 3 * TINY.loop.steps_per_iteration)
    baseline = tmp_path / "baseline.json"
    arguments = ["--preset", "quick", "--rows", "5000", "--seeds", "2", "--no-start"]
    assert bench.run([*arguments, "--json"]) == 0
    text = capsys.readouterr().out
    result = json.loads(text)
    assert result["seeds"]["2"]["parts"]["fit_epoch"]["milliseconds"] > 0
    assert 0 < result["seeds"]["2"]["parts"]["joint_update"]["share_of_flops"] < 1
    whole = result["seeds"]["2"]["thousand_steps"]
    assert whole["measured"] and whole["iterations"] == 3 and 0 < whole["fits_milliseconds"] < whole["milliseconds"]
    assert result["versions"]["jax"] == jax.__version__
    baseline.write_text(text)
    assert bench.run([*arguments, "--profile", "--baseline", str(baseline)]) == 0
    shown = capsys.readouterr()
    assert "joint update" in shown.out and "kernels" in shown.out and "ratio" in shown.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "two"], "whole numbers"),
        (["--seeds", "0,8"], "whole numbers"),
        (["--rows", "7"], "multiple of 5"),
        (["--baseline", "nowhere.json"], "not an output"),
    ],
)
def test_mistakes_in_bench_are_one_line(arguments, words, capsys):
    from doublehorizon import cli

    assert cli._status(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_warm_start_is_faster_than_a_cold_one():
    from doublehorizon.analysis.startup import measure_starts

    starts = measure_starts(3, 1, 1, "cpu")
    assert starts["warm"]["first_update"] < starts["cold"]["first_update"]
