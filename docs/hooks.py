"""Pages that are made from the code when the site is built: every command's help, every field of the config."""

import os
import re
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path

from mkdocs.structure.files import File, Files

from doublehorizon.cli.config_help import documented, groups, plain
from doublehorizon.config import Config

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
    wanted = "--help-all" if words == ("train",) else "--help"
    command = [sys.executable, "-m", "doublehorizon.cli", *words, wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def config_page() -> str:
    """Each field with its default and the words that stand under it in `config.py`."""
    parts = [
        "# Configuration\n\nEvery number of the algorithm is a field of `dh.Config`, and an option of "
        "`doublehorizon train`: `horizons.distribution` is `--horizons.distribution`. Defaults are those of the "
        "preset `dhmbpo`.\n"
    ]
    for title, prefix, record in groups(Config()):
        name, _, words = title.partition(": ")
        parts.append(f"## {name}\n\n{one_line(words)}\n\n{table(record, prefix)}")
    return "\n".join(parts)


def table(record, prefix: str) -> str:
    rows = [
        f"| `{prefix}{name}` | `{plain(getattr(record, name))}` | {one_line(words)} |"
        for name, words in documented(type(record))
        if not is_dataclass(getattr(record, name))
    ]
    return "\n".join(["| field | default | |", "|---|---|---|", *rows, ""])


def one_line(words: str) -> str:
    return words.replace("|", "\\|")
