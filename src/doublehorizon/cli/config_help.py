"""Short help with what people use, and long help with every number of the algorithm."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from doublehorizon.cli.parsing import documented, parse
from doublehorizon.config import Config

HELP_ALL = "--help-all"
_HINT = f"\n\nEvery number of the algorithm is an option too: {HELP_ALL} lists them with their defaults."


def show_help(record: type, command: str, description: str, arguments: list[str], config: Config) -> bool:
    """Prints help if that is asked for, and says whether it was. `record` has the options that are not the config's."""
    if HELP_ALL not in arguments and not {"-h", "--help"} & set(arguments):
        return False
    with suppress(SystemExit):  # how a parser ends that has shown its help
        parse(record, command, description + _HINT, ["--help"])
    if HELP_ALL in arguments:
        own = {field.replace("_", "-") for field in record.__dataclass_fields__}
        _show_config(config, own)
    return True


def _show_config(config: Config, shown: set[str]) -> None:
    """Each number with its default and its words, but for those that are `shown` under a shorter name."""
    console = Console(highlight=False, emoji=False)
    for title, prefix, record in groups(config):
        console.print(Text(f"\n{title}", style="bold"))
        for name, words in documented(type(record)):
            option = name.replace("_", "-")
            if option not in shown and not is_dataclass(getattr(record, name)):
                console.print(Text(f"  --{prefix}{option}{_values(type(record), name)}", style="cyan"))
                told = Text(f"{words} (default: {plain(getattr(record, name))})")
                console.print(Padding(told, (0, 0, 0, 6), expand=False))


def groups(config: Config) -> Iterator[tuple[str, str, Any]]:
    """Title, prefix and record of each group of numbers, and of those that are in no group."""
    for name in Config.__dataclass_fields__:
        record = getattr(config, name)
        if is_dataclass(record):
            yield f"{name}: {_first_sentence(record)}", f"{name}.", record
    yield "the rest", "", config


def _values(record: type, name: str) -> str:
    """What may be given: choices, or the kind of number."""
    hint = get_type_hints(record)[name]
    if get_origin(hint) in (Union, UnionType):  # None may be given too, and the words say what it means
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is Literal:
        return " {" + ",".join(get_args(hint)) + "}"
    if get_origin(hint) is tuple:
        return " FLOAT" * len(get_args(hint))
    return {int: " INT", float: " FLOAT", bool: ", or with no- before its name"}[hint]


def plain(value: Any) -> str:
    """A value as it is written on the command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _first_sentence(record: Any) -> str:
    return " ".join((type(record).__doc__ or "").split()).split(". ")[0].rstrip(".")
