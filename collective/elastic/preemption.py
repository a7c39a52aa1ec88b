"""A rank that gets SIGTERM leaves at the end of the step under way.

So a machine that is taken away costs no step. A rank reports such events to the other
ranks by a small number, which travels in a sum that they compute anyway.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from collective import session
from collective.elastic import generations

# The reports of a rank: it leaves; a process waits to join; all ranks must end for the
# job's next generation.
LEAVES, WAITING, RESTARTS = 1, 2, 4


class Preemption:
    """Receives SIGTERM while this context is entered.

    The first SIGTERM is recorded; a second one ends the process at once. Outside the
    main thread no signal is received. A process that this one forks is not a rank, and
    gets the previous handler: Python joins its daemon processes after a single SIGTERM.
    """

    def __init__(self) -> None:
        self.noticed = False  # whether this process got SIGTERM

    def flags(self) -> int:
        """Return this rank's report: the sum of the constants above."""
        return (
            LEAVES * self.noticed
            + WAITING * (session.waiting() > 0)
            + RESTARTS * generations.restart_requested()
        )

    def __enter__(self) -> Preemption:
        global _entered
        self._handles = threading.current_thread() is threading.main_thread()
        if self._handles:
            self._process = os.getpid()
            self._before = signal.signal(signal.SIGTERM, self._notice)
            _entered = self
        return self

    def __exit__(self, *_: object) -> None:
        global _entered
        if self._handles and not self.noticed:
            self.restore()
        _entered = None

    def restore(self) -> None:
        """Restore the previous handler."""
        # None: the handler was not Python's. The flight recorder's is not.
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # forked, and signalled before _in_child
            self.restore()
            os.kill(os.getpid(), number)
            return
        self.noticed = True
        signal.signal(number, signal.SIG_DFL)


_entered: Preemption | None = None


def _in_child() -> None:
    if _entered is not None and threading.current_thread() is threading.main_thread():
        _entered.restore()


os.register_at_fork(after_in_child=_in_child)
