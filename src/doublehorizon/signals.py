"""Ctrl-C and SIGTERM: a run that is asked to stop saves first."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Stopped(KeyboardInterrupt):
    """The user, or the machine's scheduler, asked the run to stop."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class _State:
    depth = 0
    waiting: int | None = None


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Inside, either signal raises `Stopped`. One that was ignored before stays so; only a main thread hears any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _State.waiting = None
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, _hear) for number in numbers}
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
    finally:
        _State.depth -= 1
    if _State.depth == 0 and _State.waiting is not None:
        number, _State.waiting = _State.waiting, None
        raise Stopped(number)


def _hear(number: int, frame: FrameType | None) -> None:
    if _State.depth > 0:
        _State.waiting = number
        return
    raise Stopped(number)
