"""The tree in `docs/architecture.md` is the order of the package: a file imports only files above it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "doublehorizon"


def tree() -> list[str]:
    """Modules in the order of the page, `folder.module`."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"^```text\nsrc/doublehorizon/\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    found, folder = [], ""
    for line in filter(str.strip, block[1].splitlines()):
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        if name.endswith("/"):
            folder = name.replace("/", ".")
        else:
            found.append(name if indent == 2 else folder + name)
    return found


def imported(text: str, modules: list[str]) -> set[str]:
    """Modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("doublehorizon"):
            home = (node.module or "").removeprefix("doublehorizon").lstrip(".")
            found |= {home} if home in modules else {f"{home}.{alias.name}".lstrip(".") for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("doublehorizon.") for alias in node.names}
    return found & set(modules)


def violations(sources: dict[str, str], order: list[str]) -> list[str]:
    return [
        f"{name} imports {below}, which stands below it"
        for place, name in enumerate(order)
        for below in sorted(imported(sources[name], order) - set(order[:place]))
    ]


def sources() -> dict[str, str]:
    files = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in SOURCE.rglob("*.py")}
    return {name: path.read_text() for name, path in files.items() if not name.split(".")[-1].startswith("__")}


def test_the_tree_names_every_file():
    assert sorted(tree()) == sorted(sources())


def test_files_import_only_what_stands_above_them():
    assert violations(sources(), tree()) == []


def test_a_planted_violation_is_found():
    order = tree()
    for line in ("from doublehorizon.algorithm.agent import store", "from doublehorizon.algorithm import agent"):
        planted = sources() | {"algorithm.values": f"def late():\n    {line}\n"}
        assert violations(planted, order) == ["algorithm.values imports algorithm.agent, which stands below it"]
    assert violations(sources() | {"envs.make": "import doublehorizon.api"}, order)


def test_folders_say_what_they_are_for_and_what_they_may_import():
    order = list(dict.fromkeys(name.split(".")[0] for name in tree()))
    for folder in (path.parent for path in SOURCE.glob("*/__init__.py")):
        words = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        assert "May import" in words, folder.name
        named = set(re.findall(r"`(\w+)`", words.partition("May import")[2])) & set(order)
        allowed = set(order[: order.index(folder.name)])
        assert "everything but" in words or named <= allowed, f"{folder.name}: {named - allowed}"


def test_the_root_is_small():
    assert len(list(SOURCE.glob("*.py"))) <= 14


@pytest.mark.parametrize("folders", [("acting", "envs")])
def test_nothing_up_to_acting_imports_jax(folders):
    modules = [name for name in tree() if ("." not in name and name != "api") or name.split(".")[0] in folders]
    lines = [f"import doublehorizon.{name}" for name in modules] + ["import sys", "print('jax' in sys.modules)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
