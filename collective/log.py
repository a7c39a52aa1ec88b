"""The logger of this package, ``logging.getLogger("collective")``.

Its one handler writes lines such as ``warning: ...`` to standard error. A program that
wants the records elsewhere replaces it in ``log.handlers``.
"""

from __future__ import annotations

import logging
import sys


class _ToStderr(logging.Handler):
    """Writes to what ``sys.stderr`` is at the time, and flushes."""

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.levelname.lower()}: {record.getMessage()}"
        print(text, file=sys.stderr, flush=True)


log = logging.getLogger("collective")
if not log.handlers:
    log.addHandler(_ToStderr())
    log.propagate = False
    log.setLevel(logging.INFO)
