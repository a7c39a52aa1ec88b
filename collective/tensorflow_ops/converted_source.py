"""The source that AutoGraph generates for functions: in memory, not in ``$TMPDIR``.

TensorFlow writes a file for each function and removes it when Python ends. A rank that
is killed never removes its files, so they would remain.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
from types import ModuleType
from typing import Any

from tensorflow.python.autograph.pyct import loader


def keep_in_memory() -> None:
    """Remove each file as soon as it is imported; tracebacks still show its lines."""
    stock = loader.load_source
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def load_source(source: str, *args: Any, **kwargs: Any) -> tuple[ModuleType, str]:
        module, file = stock(source, *args, **kwargs)
        # Without a time, no check of the cache looks for the file.
        lines = source.splitlines(keepends=True)
        linecache.cache[file] = (len(source), None, lines, file)
        with contextlib.suppress(OSError):
            os.remove(file)
        return module, file

    loader.load_source = load_source
