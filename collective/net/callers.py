"""Connections to a listener that have not proved its secret yet, bounded in number.

A stranger may open any number of connections and stay silent. So few are kept, and fewer for
each address. If one more arrives, the oldest is dropped: an honest caller takes milliseconds.
"""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
from collections.abc import Iterator

AT_MOST, OF_AN_ADDRESS = 64, 16


class Callers:
    """The connections that a listener has not identified yet; usable by several threads."""

    def __init__(self, at_most: int = AT_MOST, of_an_address: int = OF_AN_ADDRESS):
        self._at_most, self._of_an_address = at_most, of_an_address
        # The address of each connection, oldest first.
        self._waiting: dict[socket.socket, str] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def waiting(self, caller: socket.socket, address: str) -> Iterator[None]:
        """Count a connection while it proves the secret; it may be shut down in that time."""
        with self._lock:
            counts = collections.Counter(self._waiting.values())
            of_it = counts[address] >= self._of_an_address
            if of_it or len(self._waiting) >= self._at_most:
                oldest = next(
                    link
                    for link, of in self._waiting.items()
                    if not of_it or of == address
                )
                self._drop(oldest)
            self._waiting[caller] = address
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(caller, None)

    def drop_all(self) -> None:
        """Shut all of them down, because no process is expected any more."""
        with self._lock:
            for caller in list(self._waiting):
                self._drop(caller)

    def _drop(self, caller: socket.socket) -> None:
        del self._waiting[caller]
        with contextlib.suppress(OSError):
            caller.shutdown(socket.SHUT_RDWR)  # so that its reader sees the end
