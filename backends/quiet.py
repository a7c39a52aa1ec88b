"""Hides TensorFlow's start-up messages, unless the user asks for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from collective import streams

LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def is_quiet() -> bool:
    """Return whether ``quiet`` was used and the user set no log level."""
    return os.environ.get("COLLECTIVE_QUIET") == "1"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard everything written to file descriptor 2 inside the block.

    TensorFlow writes some lines before it has read its own log level, so the level
    alone does not silence it. A user who has set the level wants to read them.
    """
    if LEVEL in os.environ and not is_quiet():
        yield
        return
    os.environ[LEVEL], os.environ["COLLECTIVE_QUIET"] = "3", "1"
    streams.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        streams.flush()
        os.dup2(kept, 2)
        os.close(kept)
