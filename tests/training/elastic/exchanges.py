"""Counts the exchanges of this rank beside its steps, and kills it at one of them."""

from __future__ import annotations

import os
import signal

import numpy as np

from collective.backends.native import NativeBackend

_exchange = NativeBackend._broadcast_bytes
made, deadly = 0, 0  # exchanges since ``made`` was set to 0; that of this rank's death


def _counted(backend: NativeBackend, data: np.ndarray, root: int) -> None:
    global made
    made += 1
    if made == deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    _exchange(backend, data, root)


def count() -> None:
    """Begin to count the exchanges of this process."""
    NativeBackend._broadcast_bytes = _counted  # type: ignore[method-assign]
