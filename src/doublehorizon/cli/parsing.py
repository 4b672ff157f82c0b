"""From the words after a command to its options. What is wrong with them is told in one line, like all mistakes."""

import ast
import inspect
import io
import re
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import is_dataclass
from typing import Annotated, TypeVar

import tyro

from doublehorizon.errors import UserError
from doublehorizon.sb3_words import OPTIONS

T = TypeVar("T")


def parse(kind: type[T], command: str, description: str, arguments: list[str], default: T | None = None) -> T:
    """The command's options; `SystemExit` where help was asked for, and shown."""
    with_whole_sentences(kind)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            prog, words = f"doublehorizon {command}", filled(description)
            if default is None:
                return tyro.cli(kind, prog=prog, description=words, args=arguments)
            return tyro.cli(kind, prog=prog, description=words, args=arguments, default=default)
    except SystemExit:
        if not said.getvalue():
            raise
        problem = _problem(said.getvalue())
    raise UserError(f"{problem} `doublehorizon {command} --help` tells what it takes.")


def filled(description: str) -> str:
    """Paragraphs broken where the terminal ends; one with commands, whose lines are indented, stays as it is. The
    parser joins lines again that begin with a letter, so these begin with a space."""
    width = min(shutil.get_terminal_size().columns, 100)
    paragraphs = description.split("\n\n")
    return "\n\n".join(
        text if "\n  " in text else textwrap.fill(text, width, subsequent_indent=" ") for text in paragraphs
    )


def documented(record: type) -> Iterator[tuple[str, str]]:
    """The fields of a record with the words that stand under each in its source."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    assert isinstance(node, ast.ClassDef)
    for here, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):
            said = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            yield here.target.id, " ".join(str(below.value.value).split()) if said else ""  # type: ignore[union-attr]


def with_whole_sentences(kind: type) -> None:
    """Help of each field as running text: the parser would break lines where the source does."""
    for record in kind.__mro__:
        if "_whole_sentences" in vars(record) or not is_dataclass(record):
            continue
        record._whole_sentences = True  # type: ignore[attr-defined]
        for name, words in documented(record):
            if words:
                record.__annotations__[name] = Annotated[record.__annotations__[name], tyro.conf.arg(help=words)]


def _problem(printed: str) -> str:
    """What the parser's box says, in a line."""
    blocks: list[list[str]] = [[]]
    for line in printed.splitlines()[1:-1]:
        text = line.strip("│ ")
        blocks.append([]) if set(text) == {"─"} else blocks[-1].append(text)
    said = " ".join(blocks[0])
    _, of_unknown, names = said.partition("Unrecognized options: ")
    if not of_unknown:
        said = re.sub(r"Missing from .*?: (\S+) (.*) \(required\)", r"\1 is missing: \2", said)
        return said if said.endswith(".") else f"{said}."
    unknown = [name for name in names.split(", ") if name.startswith("-")]
    if not unknown:
        return f"There is no place for {names}."
    known = OPTIONS.get(unknown[0].lstrip("-").replace("-", "_"))
    offered = [line.split()[0] for block in blocks[1:-1] for line in block if line.startswith("--")]
    near = " or ".join([known] if known else offered)
    return f"There is no option {unknown[0]}." + (f" Perhaps {near}?" if near else "")
