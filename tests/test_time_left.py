"""Time left: by hand, for iterations whose work is known."""

import pytest

from doublehorizon import presets
from doublehorizon.algorithm.agent import iteration_budget
from doublehorizon.algorithm.types import Task
from doublehorizon.config import Config
from doublehorizon.training.time_left import _epoch_work, seconds_left

TASK = Task(17, 6, None)


def laps(fit: float, improve: float, collect: float = 0.0) -> dict[str, float]:
    return {"time/fit_seconds": fit, "time/improve_seconds": improve, "time/collect_seconds": collect}


def test_iterations_that_are_alike_take_as_long_as_the_last_one():
    budget = iteration_budget(presets.paper, TASK, 70_000, 1000)
    left = seconds_left(
        presets.paper, TASK, 1000, [1000 * i for i in range(71, 81)], (budget, 722.0, laps(30.0, 8.0, 2.0))
    )
    assert left == pytest.approx(10 * 40.0)


def test_the_longer_first_iteration_is_not_taken_for_the_rule():
    # 3612 epochs of one minibatch and one validation chunk (3 + 1 units) in 3612 s, so a unit is 0.25 s; the next
    # fit has 722 epochs of two minibatches and one chunk (6 + 1 units)
    budget = iteration_budget(presets.paper, TASK, 5000, 1000, first_effort=5.0)
    left = seconds_left(presets.paper, TASK, 1000, [7000], (budget, 3612.0, laps(3612.0, 0.0)))
    assert left == pytest.approx(722 * 7 * 0.25)
    # 5000 joint updates and 250 of the critics at 0.4 against 1000 and 250
    left = seconds_left(presets.paper, TASK, 1000, [7000], (budget, 3612.0, laps(0.0, 5100.0)))
    assert left == pytest.approx(1100.0)


def test_nothing_is_left_at_the_end():
    budget = iteration_budget(Config(), TASK, 70_000, 1000)
    assert seconds_left(Config(), TASK, 1000, [], (budget, 100.0, laps(1.0, 1.0))) == 0.0


def test_little_fits_are_not_validated():
    # 200 steps have 400 minibatches, 67 epochs of 6 (18 units each) in 67 s; none is spent on held-out rows
    budget = iteration_budget(presets.quick, TASK, 2000, 200)
    assert (budget.max_epochs, budget.fit_batches) == (67, 6)
    first = iteration_budget(presets.quick, TASK, 400, 200, first_effort=2.0)
    left = seconds_left(presets.quick, TASK, 200, [600], (first, 133.0, laps(133.0, 0.0)))
    assert left == pytest.approx(67.0)
    assert _epoch_work(presets.quick, budget) == 18.0
