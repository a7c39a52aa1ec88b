"""The screen that the ranks of a host share: a line that all print on stderr is shown once.

A line of stderr waits for the same line of the other ranks, for a second at most, and the
later lines of its rank wait with it. So no line is lost, and the lines of a rank keep their
order. Each line begins with the ranks that have printed it: ``[0]``, ``[0-3]``.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from collective.launch.cores import describe

WAIT_SECONDS = 0.8
_BLOCK_SECONDS = 1.0
_MOST_LINES = 1000  # most waiting lines of a rank

# Prints a line of these ranks: the text, and whether it is from stderr.
Print = Callable[[Sequence[int], str, bool], None]


class Screen:
    """Lines of several ranks, each put by a thread of its own."""

    def __init__(self) -> None:
        # The waiting lines by rank: text, whether from stderr, and until when.
        self._lines: dict[int, collections.deque[tuple[str, bool, float]]] = {}
        self._printers: dict[int, Print] = {}
        self._open: set[int] = set()  # ranks that may print more
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None

    def open(self, rank: int, printer: Print) -> None:
        """Add a rank, for whose lines the other ranks wait."""
        with self._lock:
            self._lines[rank], self._printers[rank] = collections.deque(), printer
            self._open.add(rank)

    def close(self, rank: int) -> None:
        """Note that this rank prints no more lines."""
        with self._lock:
            self._open.discard(rank)
            self._show_due(self._lines)

    def put(self, rank: int, text: str, is_error: bool) -> None:
        """Print a line of a rank, at once or in a second."""
        with self._lock:
            self._lines[rank].append((text, is_error, time.monotonic() + WAIT_SECONDS))
            if len(self._lines[rank]) > _MOST_LINES:
                self._show_first(rank)
            self._show_due([rank])
            if self._lines[rank] and self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()
            elif self._lines[rank]:
                self._lock.notify()

    def flush(self) -> None:
        """Print all lines that wait; give up after a second if nobody reads them."""
        thread = threading.Thread(target=self._flush, daemon=True)
        thread.start()
        thread.join(_BLOCK_SECONDS)

    def _flush(self) -> None:
        with self._lock:
            for rank, lines in self._lines.items():
                while lines:
                    self._show_first(rank)

    def _show_due(self, ranks: Iterable[int]) -> None:
        """Print the due first line of each rank, and the lines that waited after it."""
        left = [*ranks]
        while left:
            rank = left.pop()
            if self._lines[rank] and self._is_due(*self._lines[rank][0]):
                left += self._show_first(rank)

    def _is_due(self, text: str, is_error: bool, until: float) -> bool:
        every = not is_error or all(self._begins_with(r, text) for r in self._open)
        return every or until <= time.monotonic()

    def _begins_with(self, rank: int, text: str) -> bool:
        """Return whether the first line of a rank is this line of stderr."""
        lines = self._lines[rank]
        return bool(lines) and lines[0][:2] == (text, True)

    def _show_first(self, rank: int) -> list[int]:
        """Print the first line of a rank once for all ranks with it; return these ranks."""
        text, is_error, _ = self._lines[rank][0]
        having = [each for each in self._lines if self._begins_with(each, text)]
        having = having if is_error else [rank]
        for each in having:
            self._lines[each].popleft()
        self._printers[rank](having, text, is_error)
        return having

    def _work(self) -> None:
        """Print lines that have waited long enough."""
        with self._lock:
            while True:
                self._show_due(self._lines)
                dues = [lines[0][2] for lines in self._lines.values() if lines]
                left = min(dues, default=0.0) - time.monotonic()
                self._lock.wait(max(0.0, left) if dues else None)


def label(ranks: Sequence[int]) -> str:
    """Return the prefix of a line of these ranks, such as ``[0-2,5] ``."""
    return f"[{describe(ranks)}] "
