"""Ctrl-C, SIGTERM and a closed terminal, without leaving anything running."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt_once() -> None:
    """Makes the first ending signal a KeyboardInterrupt and ignores the rest, so that cleaning up is not cut short."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in ENDING:
        signal.signal(each, interrupt)


@contextmanager
def deferred() -> Iterator[None]:
    """Ending signals wait until the block is left. Python runs handlers in the main thread: elsewhere a no-op."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    previous = {each: signal.signal(each, lambda number, frame: arrived.append(number)) for each in ENDING}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
        for number in arrived[:1]:
            signal.raise_signal(number)
