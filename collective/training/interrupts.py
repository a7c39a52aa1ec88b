"""Ctrl-C in a training: heard between two steps, never within TensorFlow.

Its threads may still compute for a step that is left in its middle, and then end with the
process by a crash.
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
    """Whether Ctrl-C was typed since the last training has begun."""
    return _noticed


def check() -> None:
    """Raises KeyboardInterrupt where Ctrl-C was typed; called between steps."""
    if _noticed:
        raise KeyboardInterrupt


@contextlib.contextmanager
def between_steps() -> Iterator[None]:
    """Within, Ctrl-C waits for ``check``, and a second one ends the process at once.

    Not if the script handles it itself, or if a thread other than the main one trains.
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
