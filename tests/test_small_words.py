"""What newcomers stumble over: hints, numbers as people write them, figures that are none."""

from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import doublehorizon as dh
from doublehorizon.cli import _status
from doublehorizon.cli.options import _whole_number, resume_command


def test_the_hint_is_the_whole_command():
    assert resume_command("runs/a", "Pendulum-v1") == "doublehorizon resume runs/a"
    assert resume_command("runs/a b", "my_robot:make_env") == "doublehorizon resume 'runs/a b' --env my_robot:make_env"
    options = SimpleNamespace(reward="my_robot:reward", termination_rule=None, seed_policy="pi.safetensors")
    assert resume_command("r", "m:f", options) == (
        "doublehorizon resume r --env m:f --seed-policy pi.safetensors --reward my_robot:reward"
    )


def test_what_is_not_finite_is_not_tracked(tmp_path):
    tracker = dh.trackers.TensorBoard(tmp_path)
    tracker.track(10, 0, {"a": 1.0, "b": float("nan"), "c": float("inf"), "d": 2})
    tracker.close()
    assert sorted(EventAccumulator(str(tmp_path / "seed0")).Reload().Tags()["scalars"]) == ["a", "d"]


def test_a_list_in_a_pipe_does_not_break_names(tmp_path, capsys):
    name = "a-run-with-a-name-that-is-longer-than-a-terminal-of-eighty-columns-would-show-in-one-line-of-a-table"
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    assert _status(["list", str(tmp_path)]) == 0 and name in capsys.readouterr().out


@pytest.mark.parametrize(("text", "number"), [("1e5", 100_000), ("100_000", 100_000), ("7", 7), ("3.5", None)])
def test_numbers_of_steps_are_read_as_people_write_them(text, number):
    if number is None:
        with pytest.raises(ValueError, match=r"3\.5 is no whole number"):
            _whole_number(text)
    else:
        assert _whole_number(text) == number
