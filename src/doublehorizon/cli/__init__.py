"""The command `doublehorizon`. One file per command; each is imported when it is called.

May import everything but tests. Nothing imports `cli`.
"""

import os
import sys
import traceback
from importlib import import_module

from doublehorizon.cli.options import usage
from doublehorizon.errors import RunError, UserError, unknown
from doublehorizon.signals import Stopped

COMMANDS = {
    "train": "train an agent on an environment, one seed or many",
    "resume": "go on with a run that was stopped",
    "eval": "test the policies of a run in new episodes",
    "video": "record videos of the policies of a run",
    "plot": "draw learning curves of runs, and aggregates over tasks",
    "report": "write one HTML page about one or several runs",
    "compare": "compare a run with published curves, or with another run",
    "tune": "search for numbers that learn an environment in fewer steps",
    "experiment": "run one of the paper's experiments, here or on a Ray cluster",
    "analyze": "look into a run: critic error, model error, critic targets",
    "advise-horizon": "advise how long training rollouts should be",
    "export": "write a policy as ONNX or NumPy, for machines without this package",
    "list": "list tasks that are known here, or runs in a folder",
    "bench": "measure how fast the algorithm runs on this machine",
    "bench-model": "measure how well ways of fitting predict what comes next in a stored run",
    "completion": "print a script for the shell, which then completes commands and options",
}

_WITH_CONFIG = ("train", "experiment")
_PURPOSE = "Model-based reinforcement learning that needs few environment steps."
_EXAMPLE = """`doublehorizon COMMAND --help` tells more. A first try, a minute or two on two CPU cores:

  doublehorizon train Pendulum-v1 --preset quick --steps 2000"""


def main() -> None:
    """Runs the command named in `sys.argv`, at whose end the process is over."""
    status = _status(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        status = 1
    sys.stderr.flush()
    os._exit(status)  # at once: a compiler that is still busy in the background would keep an interrupted run waiting


def _status(arguments: list[str]) -> int:
    """A user's mistake is one line on stderr and status 2."""
    try:
        return _dispatch(arguments)
    except SystemExit as ended:  # the parser has printed help, or what is wrong
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except UserError as problem:
        print(f"doublehorizon: {problem} {_notes(problem)}".rstrip(), file=sys.stderr)
        return 2
    except KeyboardInterrupt as ended:
        print(f"doublehorizon: stopped. {_notes(ended)}".rstrip(), file=sys.stderr)
        return 128 + ended.number if isinstance(ended, Stopped) else 130
    except BrokenPipeError:
        return 1
    except (OSError, RunError) as problem:
        print(f"doublehorizon: {problem} {_notes(problem)}".rstrip(), file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1


def _notes(problem: BaseException) -> str:
    return " ".join(getattr(problem, "__notes__", []))


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage("doublehorizon COMMAND", _PURPOSE, COMMANDS, _EXAMPLE))
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from doublehorizon import __version__

        print(f"doublehorizon {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    if name not in _WITH_CONFIG:  # they have no more to tell
        arguments = ["--help" if word == "--help-all" else word for word in arguments]
    return import_module(f"doublehorizon.cli.{name.replace('-', '_')}").run(arguments[1:])
