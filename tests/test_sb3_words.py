"""Keywords of Stable-Baselines3 and misspelt ones get an answer; the others work as ever."""

import inspect

import pytest

import doublehorizon as dh
from doublehorizon.sb3_words import INSTEAD


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dh.DHMBPO("Pendulum-v1", verbose=1), r"progress_bar=True"),
        (lambda: dh.DHMBPO("Pendulum-v1", gamma=0.99), r"with_\(policy__discount=\.\.\.\)"),
        (lambda: dh.DHMBPO("Pendulum-v1", sede=3), r"no keyword 'sede'\. Did you mean 'seed'\?"),
        (lambda: dh.DHMBPO("Pendulum-v1").learn(100, log_interval=4), r"progress\.csv"),
        (lambda: dh.DHMBPO("Pendulum-v1").learn(100, tb_log_name="x"), r"dh\.trackers\.TensorBoard"),
        (lambda: dh.DHMBPO("Pendulum-v1").learn(100, calback=print), r"'callback'"),
    ],
)
def test_unknown_keywords_say_what_to_use(call, words):
    with pytest.raises(dh.UserError, match=words):
        call()


def test_every_answer_names_what_there_is():
    for words in INSTEAD.values():
        for name in ("policy__", "loop__", "critic__"):
            if name in words:
                setting = name + words.partition(name)[2].partition("=")[0]
                group, _, inner = setting.partition("__")
                assert inner in vars(getattr(dh.Config(), group)), setting
    assert hasattr(dh.callbacks, "EvaluateOn") and hasattr(dh.trackers, "TensorBoard")
    assert not set(INSTEAD) & set(inspect.signature(dh.DHMBPO).parameters)


def test_editors_still_see_the_signature():
    assert list(inspect.signature(dh.DHMBPO.learn).parameters)[:3] == ["self", "total_timesteps", "out"]
    assert "env" in inspect.signature(dh.DHMBPO).parameters


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: dh.DHMBPO("MlpPolicy", "Pendulum-v1"),
            r"only env may be given without its name\. .* one kind of policy",
        ),
        (lambda: dh.DHMBPO("Pendulum-v1", seeds=[0, 1]), r"seeds is \[0, 1\], but a whole number"),
        (lambda: dh.DHMBPO("Pendulum-v1", seed=True), r"seed is True"),
        (lambda: dh.DHMBPO("Pendulum-v1").learn("1000"), r"total_timesteps is '1000'"),
        (lambda: dh.DHMBPO("Pendulum-v1", config={"policy": {}}), r"config is dict, .*with_\("),
        (lambda: dh.DHMBPO("Pendulum-v1", device="abacus"), r"'abacus', but it must be cpu, gpu or auto"),
        (lambda: dh.DHMBPO("Pendulum-v1").evaluate(n_eval_episodes=3), r"episodes=\.\.\."),
        (lambda: dh.DHMBPO.load("nowhere"), r"nowhere does not exist"),
    ],
)
def test_what_is_of_a_wrong_kind_is_told_in_a_line(call, words):
    with pytest.raises(dh.UserError, match=words):
        call()


def test_devices_by_the_names_that_others_give_them():
    assert dh.DHMBPO("Pendulum-v1", device="auto").devices == dh.DHMBPO("Pendulum-v1").devices
    with pytest.raises(dh.UserError, match="'gpu', but JAX sees no such device"):
        dh.DHMBPO("Pendulum-v1", device="cuda")
