"""A rank that gets SIGTERM leaves at the end of the step under way.

So a machine that is taken away costs no step. What a rank reports to the other ranks about
such events is a small number, which travels in a sum that they compute anyway.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from collective import session
from collective.elastic import generations

# What a rank reports: it leaves; a process waits to join; all ranks are to end for the
# job's next generation.
LEAVES, WAITING, RESTARTS = 1, 2, 4


class Preemption:
    """Notices SIGTERM, while this context is entered.

    The first SIGTERM is noted; a second one ends the process at once. Outside the main
    thread no signal is received.

    Attributes:
        noticed: Whether this process got SIGTERM.
    """

    def __init__(self) -> None:
        self.noticed = False

    def flags(self) -> int:
        """What this rank has to report now: the sum of the constants above."""
        return (
            LEAVES * self.noticed
            + WAITING * (session.waiting() > 0)
            + RESTARTS * generations.restart_requested()
        )

    def __enter__(self) -> Preemption:
        self._handles = threading.current_thread() is threading.main_thread()
        if self._handles:
            self._before = signal.signal(signal.SIGTERM, self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handles and not self.noticed:
            # None: the handler was not Python's, as the flight recorder's.
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.noticed = True
        signal.signal(number, signal.SIG_DFL)
