"""Signs of trouble: each kind when it should be told, and once."""

import numpy as np
import pytest

from doublehorizon.training.trouble_signs import TroubleSigns

SEEDS = [3, 4, 5, 6]
HEALTHY = {
    "model/validation_rmse": [0.3] * 4,
    "train/q_low": [-100.0] * 4,
    "train/q_high": [300.0] * 4,
    "train/q_target_std": [50.0] * 4,
    "train/ent_coef": [0.1] * 4,
}
LEARNING = {step: dict.fromkeys(SEEDS, -100.0 + 10.0 * step) for step in range(9)}


def told(figures: dict | None = None, returns: dict | None = None, updates: int = 3000, signs=None) -> list[str]:
    metrics = {name: np.array(values) for name, values in (HEALTHY | (figures or {})).items()}
    return (signs or TroubleSigns()).new(SEEDS, updates, metrics, LEARNING if returns is None else returns)


def test_nothing_is_told_of_a_run_that_learns():
    assert told() == [] and told(returns={}) == []
    assert TroubleSigns().new(SEEDS, -1000, {}, {0: dict.fromkeys(SEEDS, 0.0)}) == []  # while actions are random


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"model/validation_rmse": [0.3, 0.97, 0.3, 1.1]}, "hardly better than the mean (seeds 4, 6: error 1.10"),
        ({"train/q_low": [-1e6, -100.0, -100.0, -100.0]}, "differs by 50 only (seed 3)"),
        ({"train/ent_coef": [0.1, 0.1, 1e-6, 0.1]}, "temperature is 1e-06 (seed 5): the policy hardly explores"),
        ({"train/ent_coef": [0.1, 0.1, 0.1, 30.0]}, "temperature is 30 (seed 6): entropy outweighs"),
    ],
)
def test_a_sign_in_the_figures_is_told_once_with_what_to_try(figures, words):
    signs = TroubleSigns()
    assert told(figures, updates=2999, signs=signs) == []  # too early
    (line,) = told(figures, signs=signs)
    assert words in line and "Try " in line and "\n" not in line
    assert told(figures, signs=signs) == []


def test_a_run_without_a_model_has_no_model_to_complain_of():
    metrics = {name: np.array(values) for name, values in HEALTHY.items() if not name.startswith("model")}
    assert TroubleSigns().new(SEEDS, 3000, metrics, LEARNING) == []


def test_returns_that_never_pass_those_of_the_first_actions():
    flat = {step: {3: -200.0, 4: -210.0, 5: -190.0, 6: -200.0} for step in range(7)}
    (line,) = told(returns=flat)
    assert "after 6 tests no policy was better than the first actions (return -200)" in line
    assert told(returns={step: flat[step] for step in range(6)}) == []  # fewer tests
    assert told(returns=flat | {4: flat[4] | {5: -150.0}}) == []  # one seed was better once


def test_a_seed_far_behind_the_others():
    last = {3: 1000.0, 4: 1010.0, 5: 400.0, 6: 990.0}
    (line,) = told(returns=LEARNING | {8: last, 9: last})
    assert line.startswith("seed 5 is far behind the others (return 400, they have 990 to 1010)")
    wide = {3: 1000.0, 4: 700.0, 5: 400.0, 6: 990.0}  # as they differ anyway
    assert told(returns=LEARNING | {8: wide, 9: wide}) == []
    assert told(returns={0: last, 1: last, 2: last}) == []
