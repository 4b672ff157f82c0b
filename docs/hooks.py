"""Pages that are made from the code when the site is built: every command's help, every field of the config."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.structure.files import File, Files

SOURCE = Path(__file__).parents[1] / "src" / "doublehorizon"


def on_files(files: Files, config) -> Files:
    for name, content in (("commands.md", commands_page()), ("config.md", config_page())):
        files.append(File.generated(config, name, content=content))
    return files


def commands_page() -> str:
    parts = ["# Commands\n"]
    usage = help_of()
    parts.append(f"```text\n{usage}\n```\n")
    for name in commands_in(usage):
        parts.append(f"## {name}\n\n```text\n{help_of(name)}\n```\n")
        for inner in commands_in(help_of(name)) if name == "analyze" else ():
            parts.append(f"### {name} {inner}\n\n```text\n{help_of(name, inner)}\n```\n")
    return "\n".join(parts)


def commands_in(usage: str) -> list[str]:
    """Names at the beginning of a line that have a file of their own."""
    names = re.findall(r"^  ([\w-]+) +\S", usage, re.MULTILINE)
    files = {path.stem.removeprefix("analyze_").replace("_", "-") for path in (SOURCE / "cli").glob("*.py")}
    return [name for name in names if name in files]


def help_of(*words: str) -> str:
    environment = os.environ | {"COLUMNS": "110", "TERM": "dumb", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "doublehorizon.cli", *words, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def config_page() -> str:
    """Each field with its default and the words that stand under it in `config.py`."""
    parts = [
        "# Configuration\n\nEvery number of the algorithm is a field of `dh.Config`, and an option of "
        "`doublehorizon train`: `horizons.distribution` is `--horizons.distribution`. Defaults are those of the "
        "preset `dhmbpo`.\n"
    ]
    groups = {}
    for node in ast.parse((SOURCE / "config.py").read_text()).body:
        if isinstance(node, ast.ClassDef):
            groups[node.name] = (ast.get_docstring(node) or "", list(fields(node)))
    own = [entry for entry in groups["Config"][1] if entry[1] not in groups]
    for name, kind, _, _ in groups["Config"][1]:
        if kind in groups:
            title, entries = groups[kind]
            parts.append(f"## {name}\n\n{one_line(title)}\n\n{table(entries, name + '.')}")
    parts.append(f"## The rest\n\n{table(own, '')}")
    return "\n".join(parts)


def fields(node: ast.ClassDef):
    for here, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):
            words = following.value.value if isinstance(following, ast.Expr) else ""  # type: ignore[attr-defined]
            default = "" if here.value is None else ast.unparse(here.value)
            yield here.target.id, ast.unparse(here.annotation), default, words


def table(entries, prefix: str) -> str:
    rows = [
        f"| `{prefix}{name}` | `{default.replace('|', '')}` | {one_line(words)} |"
        for name, _, default, words in entries
    ]
    return "\n".join(["| field | default | |", "|---|---|---|", *rows, ""])


def one_line(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")
