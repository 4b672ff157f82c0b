import numpy as np
import pytest
from scipy import stats

from doublehorizon.analysis.curves import compare, find_curves, normalized_scores, read_curves, scores, task_of
from doublehorizon.analysis.figures import plot
from doublehorizon.errors import UserError


def curves(*finals: float) -> dict:
    return {str(k): {0: 0.0, 10: final, 20: final + 2.0} for k, final in enumerate(finals)}


def test_the_interval_is_welchs():
    ours, theirs = [1.0, 2.0, 4.0, 3.5], [5.0, 9.0, 7.0]
    result = compare(curves(*ours), curves(*theirs), (10, 20))
    assert result.difference == pytest.approx(np.mean(ours) - np.mean(theirs))
    # by hand: Welch-Satterthwaite
    a, b = np.var(ours, ddof=1) / 4, np.var(theirs, ddof=1) / 3
    freedom = (a + b) ** 2 / (a**2 / 3 + b**2 / 2)
    half = stats.t.ppf(0.975, freedom) * np.sqrt(a + b)
    assert (result.low, result.high) == pytest.approx((result.difference - half, result.difference + half))
    assert result.below and not result.above
    assert compare(curves(*theirs), curves(*ours), (10, 20)).above
    alike = compare(curves(1.0, 5.0), curves(2.0, 4.5), (10, 20))
    assert not alike.below and not alike.above


def test_what_two_runs_have_in_common_is_compared(tmp_path, capsys):
    from doublehorizon import cli

    for name, shift, steps in (("a", 0.0, (0, 10, 20, 30)), ("b", 50.0, (0, 10, 25, 30)), ("c", 0.0, (0, 7))):
        rows = [f"{step},{step + k + shift},{k}" for step in steps for k in range(3)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["step,reward,seed", *rows]))
    a, b, c = (str(tmp_path / f"{name}.csv") for name in "abc")
    assert cli._status(["compare", b, a]) == 0
    said = capsys.readouterr().out
    assert "mean return at 10, 30;" in said and "difference 50.0" in said and f"{b} is above, beyond chance" in said
    assert cli._status(["compare", a, b]) == 0 and f"{a} is below, beyond chance" in capsys.readouterr().out
    assert cli._status(["compare", a, "--reference", a]) == 0
    assert "this run is neither above nor below beyond chance" in capsys.readouterr().out
    assert cli._status(["compare", a, c]) == 2
    assert "the first at 0, 10, 20, 30, the second at 0, 7. Name the steps that count" in capsys.readouterr().err
    assert cli._status(["compare", b, a, "--steps", "20", "25"]) == 0  # b at 20 and a at 25 lie between two tests
    said = capsys.readouterr().out
    assert "at 20, 25, between two tests on the line that joins them;" in said and "difference 50.0" in said


def test_a_run_that_misses_an_evaluation_is_named():
    short = curves(1.0, 2.0)
    del short["1"][20]
    with pytest.raises(UserError, match="seed 1 has no evaluation at step 20"):
        scores(short, (10, 20))


def test_a_return_between_two_tests_is_on_the_line_that_joins_them():
    tested = {"0": {0: 0.0, 20: 10.0, 30: 40.0}}
    assert scores(tested, (5, 20, 29)) == [(2.5 + 10.0 + 37.0) / 3]
    with pytest.raises(UserError, match="no evaluation at step 31"):
        scores(tested, (31,))


def test_methods_that_were_tested_at_other_steps_are_scored_where_all_have_come_to():
    ours = {"0": {0: 0.0, 10: 2.0, 20: 4.0}, "1": {0: 0.0, 10: 4.0, 20: 8.0}}
    theirs = {"0": {0: 0.0, 9: 9.0, 15: 15.0}}  # its last test is at 15, where ours have 3 and 6
    found, units = normalized_scores({"a": {"x": ours, "y": theirs}, "b": {"x": ours, "y": theirs}}, ["x", "y"], "y")
    assert units == {"a": 15.0, "b": 15.0}
    np.testing.assert_allclose(found["x"]["a"], [0.2, 0.4])
    found, _ = normalized_scores({"a": {"x": ours}, "b": {"x": ours}}, ["x"], "x", until=12)
    np.testing.assert_allclose(found["x"]["b"], [2 / 3, 4 / 3])  # by their tests at 10
    untrained = {"0": {0: 1.0}}
    assert normalized_scores({"a": {"x": untrained}, "b": {"x": ours}}, ["x"], "x") == ({}, {})


def test_files_are_read_by_column_name_and_a_seed_may_have_run_twice(tmp_path):
    (tmp_path / "Hopper.csv").write_text(
        "step,time,reward,seed,critic_loss\n0.0,1,5,3,\n10.0,2,6,3,0.1\n0,1,7,3,\n10,1,8,3,\n"
    )
    found = read_curves(tmp_path / "Hopper.csv")
    assert found == {"3": {0: 5.0, 10: 6.0}, "3#2": {0: 7.0, 10: 8.0}}
    assert find_curves(tmp_path, "Hopper") == found
    with pytest.raises(UserError, match=r"eval.csv or Ant.csv"):
        find_curves(tmp_path, "Ant")
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"bad.csv"):
        read_curves(tmp_path / "bad.csv")


def test_the_task_of_a_run_is_named_as_published_files_are(tmp_path):
    (tmp_path / "config.json").write_text('{"env": {"name": "paper/Hopper"}}')
    assert task_of(tmp_path) == "Hopper"
    assert task_of(tmp_path / "absent") is None


def test_a_plot_is_drawn(tmp_path):
    plot({"ours": curves(1.0, 2.0), "theirs": curves(3.0)}, "Hopper", tmp_path / "deep" / "figure.png")
    assert (tmp_path / "deep" / "figure.png").read_bytes().startswith(b"\x89PNG")
