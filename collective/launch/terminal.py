"""The terminal as the standard input of rank 0, which has a session of its own.

A process of another session cannot read a terminal, so the launcher passes on each line that
is typed while the job runs, as ssh does.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from typing import IO

_POLL_SECONDS = 0.2


def pass_on(to: IO[bytes]) -> None:
    """Start a thread that passes typed lines to a process; Ctrl-D closes its input."""
    args = (sys.stdin.fileno(), to)
    threading.Thread(target=_copy, args=args, daemon=True).start()


def _copy(terminal: int, to: IO[bytes]) -> None:
    try:
        with to:
            while data := _typed(terminal):
                to.write(data)
                to.flush()
    except OSError:  # the process has ended, or the terminal was closed
        pass


def _typed(terminal: int) -> bytes:
    """Return the next line; empty after Ctrl-D.

    In the background (``&``, Ctrl-Z and ``bg``) it waits: a read would stop the launcher.
    """
    while True:
        if os.tcgetpgrp(terminal) != os.getpgrp():
            time.sleep(_POLL_SECONDS)
        elif select.select([terminal], [], [], _POLL_SECONDS)[0]:
            return os.read(terminal, 1 << 16)
