"""Help that fits a screen or two, help with everything, and configs from files."""

import dataclasses
import json
import re

import pytest

from doublehorizon import presets
from doublehorizon.cli import _status
from doublehorizon.cli.config_help import groups
from doublehorizon.cli.parsing import documented
from doublehorizon.cli.train import config_named_in
from doublehorizon.config import Config
from doublehorizon.config_json import read_config, to_json
from doublehorizon.errors import UserError


def told(capsys, *words: str) -> str:
    assert _status([*words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "experiment", "resume", "eval", "video", "plot", "report", "compare"])
def test_help_is_short_and_speaks_of_no_none(command, capsys):
    text = told(capsys, command, "--help")
    assert "examples:" in text and len(text.splitlines()) <= 80  # two screens
    assert "None" not in text


def test_short_help_has_what_people_use_and_names_the_rest(capsys):
    text = told(capsys, "train", "--help")
    for words in (
        "--preset",
        "--config PATH",
        "--seeds INT",
        "--out PATH",
        "--num-envs INT",
        "HalfCheetah",
        "--help-all",
    ):
        assert words in text
    assert "--fit.batch-size" not in text


def test_long_help_has_every_number_once_with_the_presets_default(capsys):
    text = told(capsys, "train", "--preset", "quick", "--help-all")
    options = re.findall(r"^(?:│|  ?)?\s*(--\w[\w.-]*)", text, re.MULTILINE)
    assert len(options) == len(set(options))
    numbers = {f"--{prefix}{name}" for _, prefix, record in groups(Config()) for name, _ in documented(type(record))}
    numbers -= {f"--{field.name}" for field in dataclasses.fields(Config) if dataclasses.is_dataclass(field.type)}
    shorter = {f"--loop.{name}" for name in ("num_envs", "single_env", "checkpoint_every", "replay_episodes")}
    shorter |= {"--policy.updates_per_step"}
    assert {name.replace("_", "-") for name in numbers - shorter} <= set(options)
    assert not {name.replace("_", "-") for name in shorter} & set(options)
    assert re.search(r"--fit.batch-size INT\n +Rows of a minibatch, .*\(default: 256\)", text)
    assert re.search(r"--model.noise \{constant,state\}\n", text)
    assert "--model.dropout FLOAT FLOAT FLOAT\n" in text and "(default: 0.0225 0.015 0.0075)" in text
    assert "--policy.keep-moments, or with no- before its name" in text


def test_every_number_has_its_words():
    for _, prefix, record in groups(Config()):
        for name, words in documented(type(record)):
            assert words or dataclasses.is_dataclass(getattr(record, name)), prefix + name


def test_a_config_comes_from_a_runs_file_or_from_one_of_its_own(tmp_path):
    config = presets.quick.with_(policy__width=48)
    own, run, some = (tmp_path / name for name in ("own.json", "run.json", "some.json"))
    own.write_text(json.dumps(to_json(config)))
    run.write_text(json.dumps({"env": "Pendulum-v1", "config": to_json(config)}))
    some.write_text('{"policy": {"width": 48}}')
    assert read_config(own) == read_config(run) == config_named_in(["--config", str(own)]) == config
    assert config_named_in([f"--config={some}"]) == Config().with_(policy__width=48)
    assert config_named_in(["--preset=light"]) == presets.light and config_named_in([], "paper") == presets.paper


@pytest.mark.parametrize("text", ["[1]", "{", '{"policy": {"wdith": 3}}', '{"policy": {"width": -3}}'])
def test_what_is_no_config_is_told(text, tmp_path):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(UserError, match=r"bad\.json|width"):
        read_config(tmp_path / "bad.json")
