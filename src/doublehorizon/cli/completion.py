"""`doublehorizon completion`."""

from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Literal

import tyro

from doublehorizon.cli import COMMANDS

_EXAMPLES = """Prints a script that lets a shell complete commands, options and paths.

examples:
  source <(doublehorizon completion bash)          # put this line into ~/.bashrc
  source <(doublehorizon completion zsh)           # or into ~/.zshrc"""

_SCRIPT = """{zsh}_doublehorizon() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    if [ "$COMP_CWORD" -eq 1 ] || [[ "$current" == -* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    else
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}}
complete -o filenames -F _doublehorizon doublehorizon
"""


@dataclass
class Completion:
    """What `doublehorizon completion` takes."""

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional]
    """For which shell."""


def run(arguments: list[str]) -> int:
    """Parses and prints the script."""
    options = tyro.cli(Completion, prog="doublehorizon completion", description=_EXAMPLES, args=arguments)
    print(script(options.shell))
    return 0


def script(shell: str) -> str:
    """Completion by the parsers themselves: no list of options to keep up to date."""
    cases = "\n".join(f'            {name}) words="{" ".join(_options(name))}" ;;' for name in COMMANDS)
    zsh = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return _SCRIPT.format(zsh=zsh, commands=" ".join(COMMANDS), cases=cases)


def _options(command: str) -> list[str]:
    """The long options of a command, which takes a record of the same name."""
    record = getattr(import_module(f"doublehorizon.cli.{command}"), command.capitalize())
    parser = tyro.extras.get_parser(record, prog=command)
    return sorted({word for action in parser._actions for word in action.option_strings if word.startswith("--")})
