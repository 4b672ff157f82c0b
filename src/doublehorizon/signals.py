"""Ctrl-C, SIGTERM and orphaned processes: a run that is asked to stop saves first."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType


class Stopped(KeyboardInterrupt):
    """The user, or the machine's scheduler, asked the run to stop. `advice` says how it is continued."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number, self.advice = number, ""

    def _render_traceback_(self) -> list[str]:
        """What IPython and notebooks show."""
        return [f"doublehorizon: stopped. {self.advice}"]

    def with_advice(self, advice: str) -> "Stopped":
        """From now on Python shows it in one line, instead of a traceback, if nobody catches it."""
        self.advice = advice
        if not isinstance(sys.excepthook, _ExceptHook):
            sys.excepthook = _ExceptHook(sys.excepthook)
        return self


class _ExceptHook:
    """What Python calls for an exception that nobody has caught."""

    def __init__(self, before: Callable[..., object]):
        self._before = before

    def __call__(self, kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
        if isinstance(problem, Stopped) and problem.advice:
            print(*problem._render_traceback_(), file=sys.stderr)
        else:
            self._before(kind, problem, trace)


class _State:
    depth = 0
    waiting: int | None = None


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Inside, either signal raises `Stopped`; one that was ignored before stays so. Only a main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _State.waiting = None
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, _on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def unstoppable() -> Iterator[None]:
    """Inside, a signal waits until the end: what is done here must not be half done."""
    _State.depth += 1
    try:
        yield
    except BaseException:
        _State.waiting = None  # what was raised ends the run as well
        raise
    finally:
        _State.depth -= 1
    if _State.depth == 0 and _State.waiting is not None:
        number, _State.waiting = _State.waiting, None
        raise Stopped(number)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _State.depth > 0:
        _State.waiting = number
        return
    raise Stopped(number)


def when_orphaned(parent: int, leave: Callable[[], object]) -> None:
    """Calls `leave` soon after the parent process has ended, however that ended, from a thread of its own."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        leave()

    threading.Thread(target=watch, daemon=True).start()
