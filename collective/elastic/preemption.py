"""A rank that is told to end (SIGTERM) leaves at the end of the step under way.

So a machine that is to be taken away costs no step. What a rank has to tell the others
of such things is a small number: it rides in what they sum anyway.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from collective import session
from collective.elastic import generations

# What a rank tells: it leaves; somebody waits to come in; all are to end for the job's
# next round.
LEAVES, WAITING, RENEWS = 1, 2, 4


class Preemption:
    """Whether this process was told to end, while this is entered.

    The first SIGTERM is heeded; a second one ends the process at once. Outside the main
    thread no signal is heard.
    """

    def __init__(self) -> None:
        self.noticed = False

    def news(self) -> int:
        """What this rank has to tell the others now: the above, added."""
        return (
            LEAVES * self.noticed
            + WAITING * (session.waiting() > 0)
            + RENEWS * generations.asked()
        )

    def __enter__(self) -> Preemption:
        self._heard = threading.current_thread() is threading.main_thread()
        if self._heard:
            self._before = signal.signal(signal.SIGTERM, self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        if self._heard and not self.noticed:
            # None: it was not Python's, as the flight recorder's.
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.noticed = True
        signal.signal(number, signal.SIG_DFL)
