"""The command `doublehorizon`. One file per command; each is imported when it is called."""

import difflib
import os
import sys
from importlib import import_module

from doublehorizon.errors import RunError, UserError

_COMMANDS = {
    "train": "train an agent on an environment, one seed or many",
    "compare": "compare a run with published curves, or with another run",
}


def main() -> None:
    """Runs the command named in `sys.argv`. A user's mistake is one line on stderr and status 2."""
    try:
        sys.exit(_dispatch(sys.argv[1:]))
    except UserError as problem:
        print(f"doublehorizon: {problem}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("doublehorizon: stopped. Policies that were learnt are in the run folder.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (OSError, RunError) as problem:
        print(f"doublehorizon: {problem}", file=sys.stderr)
        sys.exit(1)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from doublehorizon import __version__

        print(f"doublehorizon {__version__}")
        return 0
    name = arguments[0]
    if name not in _COMMANDS:
        near = difflib.get_close_matches(name, _COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UserError(f"there is no command {name!r}.{hint} Commands: {', '.join(_COMMANDS)}.")
    return import_module(f"doublehorizon.cli.{name}").run(arguments[1:])


def _usage() -> str:
    lines = [f"  {name:<9} {what}" for name, what in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: doublehorizon COMMAND ...",
            "",
            "Model-based reinforcement learning that needs few environment steps.",
            "",
            *lines,
            "",
            "`doublehorizon COMMAND --help` tells more. A first try, about two minutes on two CPU cores:",
            "",
            "  doublehorizon train Pendulum-v1 --preset quick --steps 2000",
        ]
    )
