"""Ctrl-C in a training: it takes effect between two steps, never within TensorFlow.

If a step were left in its middle, TensorFlow's threads could still compute for it, and would
crash at the end of the process.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from collective.backends.base import end_process

INTERRUPTED = 130  # the exit code
_noticed = False


def noticed() -> bool:
    """Return whether Ctrl-C was typed since the last training began."""
    return _noticed


def check() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was typed; called between steps."""
    if _noticed:
        raise KeyboardInterrupt


@contextlib.contextmanager
def between_steps() -> Iterator[None]:
    """Have Ctrl-C wait for ``check``; a second one ends the process at once.

    Nothing changes if the script handles Ctrl-C itself, or if a thread other than the main
    one trains.
    """
    global _noticed
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) != signal.default_int_handler:
        yield
        return
    _noticed = False
    signal.signal(signal.SIGINT, _notice)
    try:
        yield
        check()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _notice(number: int, frame: FrameType | None) -> None:
    global _noticed
    if _noticed:
        end_process(INTERRUPTED)
    _noticed = True
