"""Every code block of the README and the docs is run, with small sizes where a user would wait for hours."""

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import doublehorizon as dh
from doublehorizon.envs.obs_layout import ObsEntry, ObsLayout
from doublehorizon.presets import RELATIVES
from test_cli import TINY_OPTIONS
from worlds import TINY

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = {
    "make": "CI runs make lint and make test, and other tests the rest",
    "pip": "the newcomer's script installs the wheel",
    "git": "CI clones",
    "python": "benchmarks take minutes and other people's packages",
    "bench": "tests/test_speed.py runs it with small sizes",
    "bench-model": "tests/test_replay_forward.py runs it with small sizes",
    "tune": "tests/test_tuning.py runs it with small sizes",
    "tuning/Pendulum-v1/best.json": "tests/test_help.py reads such files",
    "--on": "tests/test_experiments.py runs on a cluster",
}
SMALL = {"--steps": "80", "--seeds": "2", "--episodes": "1", "--states": "128", "--rollouts": "16"}
LANGUAGES = {"python", "console", "text", "bibtex", "diff"}


def blocks(page: Path) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def test_modules_that_pages_name_exist():
    package = ROOT / "src" / "doublehorizon"
    files = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    places = (ROOT, package, package / "algorithm", package / "acting", package / "training", package / "run")
    modules = {path.stem: path.read_text() for path in (package / "algorithm").glob("*.py")}
    for page in PAGES:
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text()):
            assert any((place / name).is_file() for place in places) or name in files, f"{page.name}: {name}"
        for module, inner in re.findall(r"`(\w+)\.(\w+)`", page.read_text()):
            assert inner == "py" or module not in modules or re.search(rf"\b{inner}\b", modules[module]), (
                f"{page.name}: {module}.{inner}"
            )
        for folder, inner in re.findall(r"`(run|training|acting|algorithm|envs|analysis)\.(\w+)[.`]", page.read_text()):
            assert (package / folder / f"{inner}.py").is_file(), f"{page.name}: {folder}.{inner}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "run"
    dh.DHMBPO("Pendulum-v1", seeds=2, config=TINY).learn(80, out=folder)
    return folder


@pytest.fixture
def desk(trained, tmp_path, monkeypatch) -> Path:
    """A working directory with what the pages take for granted."""
    for name in ("pendulum", "cheetah", "cartpole", "robot"):
        shutil.copytree(trained, tmp_path / "runs" / name)
    named = ObsLayout((ObsEntry(("levels",), (2,)), ObsEntry(("wanted",), (1,))), (1,))
    policy = dataclasses.replace(dh.load_policy(trained), layout=named)
    policy.save(tmp_path / "runs" / "tanks" / "policy" / "seed0.safetensors")
    methods = ("gym/esvg", "gym/macura", "gym/sac", "dmc/esvg", "dmc/tdmpc2_mpc", "dmc/dreamerv3", "dmc/sac")
    published = (*methods, "roll/no-roll", "roll/no-t-roll")
    for name in ("FOLDER", "FOLDER_OR_CSV", *(f"PUBLISHED/{name}" for name in published)):
        (tmp_path / name).mkdir(parents=True)
        for task in ("Pendulum-v1", "HalfCheetah", "Hopper", "Walker2d", "Ant", "cartpole-swingup", "walker-run"):
            shutil.copy(trained / "eval.csv", tmp_path / name / f"{task}.csv")
    (tmp_path / "my_robot.py").write_text(
        "import gymnasium as gym\ndef make_env():\n    return gym.make('Pendulum-v1')\n"
    )
    (tmp_path / "results").symlink_to(ROOT / "results")  # as in a clone
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def complaint(line: str) -> str:
    """What goes wrong with a line of a console block, made small; nothing if all is well."""
    words = shlex.split(line.partition(">")[0], comments=True)
    if ELSEWHERE.keys() & {*words[:2], *words[-2:]} or "=" in words[0]:  # or a variable of the shell
        return ""
    assert words[0] == "doublehorizon", line
    command, *rest = words[1:]
    for k, word in enumerate(rest):
        if word in SMALL and k + 1 < len(rest) and command != "compare":
            rest[k + 1] = SMALL[word]
    if command in ("train", "experiment"):
        if "--out" in rest:
            shutil.rmtree(rest[rest.index("--out") + 1], ignore_errors=True)
        rest += [*_tiny(rest), "--quiet"]
    if command == "resume" and "--steps" in rest:
        rest[rest.index("--steps") + 1] = "120"
    if command == "compare":
        rest = [*rest[: rest.index("--steps")], *_options_behind(rest)] if "--steps" in rest else rest
        rest += ["--steps", "0", "80"]
    done = subprocess.run(
        [sys.executable, "-m", "doublehorizon.cli", command, *rest],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return "" if done.returncode == 0 else f"{line}\n{done.stderr}"


def _tiny(rest: list[str]) -> list[str]:
    """Small sizes, but nothing that a preset of the family is made of."""
    words = TINY_OPTIONS.split()
    pairs = list(zip(words[::2], words[1::2], strict=True))
    preset = rest[rest.index("--preset") + 1] if "--preset" in rest else ""
    made_of = {"--" + name.replace("_", "-") for name in RELATIVES.get(preset, {})}
    return [word for pair in pairs if pair[0] not in made_of for word in pair]


def _options_behind(rest: list[str]) -> list[str]:
    """What follows the numbers of --steps."""
    behind = rest[rest.index("--steps") + 1 :]
    return behind[next((k for k, word in enumerate(behind) if word.startswith("--")), len(behind)) :]


def test_blocks_say_what_they_are():
    for page in PAGES:
        for language, _ in blocks(page):
            assert language in LANGUAGES, f"{page.name}: {language!r}"


@pytest.fixture
def patched(tmp_path, monkeypatch) -> Path:
    """A copy of the package, which is what commands run from now on."""
    shutil.copytree(ROOT / "src", tmp_path / "src")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))
    return tmp_path


def apply(patch: str, folder: Path) -> set[str]:
    """Patches the copy; the files that changed."""
    done = subprocess.run(["git", "apply", "-"], cwd=folder, input=patch, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}\n{patch}"
    return set(re.findall(r"^\+\+\+ b/(\S+)$", patch, re.MULTILINE))


def test_extensions_touch_two_files_each_and_train_together(patched, desk):
    found = blocks(ROOT / "docs" / "extending.md")
    patches = [code for language, code in found if language == "diff"]
    assert [len(apply(patch, patched)) for patch in patches] == [2, 2, 2]
    lines = [code.strip().removeprefix("$ ") for language, code in found if language == "console"]
    options = [line.partition("--steps 2000")[2] for line in lines]
    assert len(lines) == 3 and all(options)
    problem = complaint(lines[0] + "".join(options[1:]) + " --out runs/extended")
    assert not problem, problem
    config = json.loads((desk / "runs" / "extended" / "config.json").read_text())["config"]
    assert config["loop"]["exploration"] == "pink" and config["critic"]["pessimism"] == 0.5
    assert config["policy"]["newest_share"] == 0.25


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs(page, patched, desk):
    for language, code in blocks(page):
        if language == "diff":
            apply(code, patched)
        elif language == "python":
            exec(compile(code.replace("2_000", "600"), str(page), "exec"), {})
        elif language == "console":
            for line in code.splitlines():
                problem = complaint(line.removeprefix("$ ")) if line.startswith("$ ") else ""
                assert not problem, problem


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "WARNING -" not in done.stderr, done.stderr
    config = (tmp_path / "site" / "config" / "index.html").read_text()
    assert "horizons.distribution" in config and "policy.learning_rate" in config
    commands = (tmp_path / "site" / "commands" / "index.html").read_text()
    assert "doublehorizon resume" in commands and "--checkpoint-every" in commands
    # every public name and what an agent can do have an entry on the page about Python
    python = (tmp_path / "site" / "api" / "index.html").read_text()
    entries = {name.rsplit(".", 1)[-1] for name in re.findall(r'<h[345] id="(doublehorizon[^"]+)"', python)}
    agent = {name for name in vars(dh.DHMBPO) if not name.startswith("_")} - {"worker_spec"}
    classes = {name: kind for name, kind in vars(dh.callbacks).items() if isinstance(kind, type) and name[0] != "_"}
    ready = {name for name, kind in classes.items() if issubclass(kind, dh.Callback)}
    assert agent | ready | {"DHMBPO", "Config", "load_policy", "UserError", "on_evaluation", "with_"} <= entries
