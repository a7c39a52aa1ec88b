"""The logger of this package, ``logging.getLogger("collective")``.

Its one handler writes lines such as ``warning: ...`` to standard error. A program that
wants the records elsewhere replaces it in ``log.handlers``. ``COLLECTIVE_LOG=debug`` shows
what was chosen, and why; ``warning`` and ``error`` show less.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys

VARIABLE = "COLLECTIVE_LOG"


class _ToStderr(logging.Handler):
    """A handler that writes to the current ``sys.stderr``, and flushes it."""

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.levelname.lower()}: {record.getMessage()}"
        # A script may have closed it, or its reader have ended.
        with contextlib.suppress(ValueError, OSError):
            print(text, file=sys.stderr, flush=True)


def _level(name: str) -> int:
    """Return the level of a name such as ``debug``; by default ``info``."""
    level = logging.getLevelName(name.strip().upper() or "INFO")
    return level if isinstance(level, int) else logging.INFO


log = logging.getLogger("collective")
if not log.handlers:
    log.addHandler(_ToStderr())
    log.propagate = False
    log.setLevel(_level(os.environ.get(VARIABLE, "")))
