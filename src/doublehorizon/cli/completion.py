"""`doublehorizon completion`."""

from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Literal

import tyro

from doublehorizon.cli import COMMANDS
from doublehorizon.cli.analyze import ANALYSES
from doublehorizon.cli.parsing import parse
from doublehorizon.experiments.paper_experiments import EXPERIMENTS

_EXAMPLES = """Prints a script that lets a shell complete commands, options and paths.

examples:
  source <(doublehorizon completion bash)          # put this line into ~/.bashrc
  source <(doublehorizon completion zsh)           # or into ~/.zshrc"""

_SCRIPT = """{zsh}_doublehorizon() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} words="" second=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    if [ "$COMP_CWORD" -eq 2 ]; then
        case "${{COMP_WORDS[1]}}" in
{seconds}
        esac
    fi
    if [ "$COMP_CWORD" -eq 1 ] || [[ "$current" == -* ]] || [ -n "$second" ]; then
        COMPREPLY=($(compgen -W "$words $second" -- "$current"))
    else
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}}
complete -o filenames -F _doublehorizon doublehorizon
"""

_SECONDS = {"analyze": ANALYSES, "experiment": EXPERIMENTS, "completion": ("bash", "zsh")}
"""What may stand behind a command."""


@dataclass
class Completion:
    """What `doublehorizon completion` takes."""

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional]
    """For which shell."""


def run(arguments: list[str]) -> int:
    """Parses and prints the script."""
    options = parse(Completion, "completion", _EXAMPLES, arguments)
    print(script(options.shell))
    return 0


def script(shell: str) -> str:
    """Completion by the parsers themselves: no list of options to keep up to date."""
    cases = "\n".join(f'            {name}) words="{" ".join(_options(name))}" ;;' for name in COMMANDS)
    seconds = "\n".join(f'            {name}) second="{" ".join(words)}" ;;' for name, words in _SECONDS.items())
    zsh = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return _SCRIPT.format(zsh=zsh, commands=" ".join(COMMANDS), cases=cases, seconds=seconds)


def _options(command: str) -> list[str]:
    """The long options of a command, and of what may stand behind it, which take records of the same names."""
    names = [(command, command), *((f"analyze-{name}", name) for name in ANALYSES if command == "analyze")]
    words: set[str] = set()
    for module, record in names:
        home = import_module(f"doublehorizon.cli.{module.replace('-', '_')}")
        parser = tyro.extras.get_parser(getattr(home, record.title().replace("-", "")), prog=command)
        words |= {word for action in parser._actions for word in action.option_strings if word.startswith("--")}
    return sorted(words)
