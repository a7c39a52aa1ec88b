"""The screen that the ranks of a host share: what all print alike on stderr is shown once.

A line of stderr waits for the same line of the other ranks, for a second at most, and what
its rank prints behind it waits, too: nothing is lost, and no rank's lines change their
order. Who has printed a line is in front of it: ``[0]``, ``[0-3]``.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from collective.launch.cores import describe

WAIT_SECONDS = 0.8
_BLOCK_SECONDS = 1.0
_MOST_LINES = 1000  # of a rank, that wait
_MOST_NESTED = 20  # lines that ranks have in other orders, each before another

# Prints a line of these ranks: a text, and whether it is of stderr.
Print = Callable[[Sequence[int], str, bool], None]


class _Waiting:
    """Lines of a rank, in their order: text, whether of stderr, and until when it waits."""

    def __init__(self) -> None:
        self.lines: collections.deque[tuple[str, bool, float]] = collections.deque()
        self.errors: collections.Counter[str] = collections.Counter()
        self.open = True  # whether more may come

    def put(self, text: str, is_error: bool, until: float) -> None:
        self.lines.append((text, is_error, until))
        self.errors[text] += is_error

    def begins_with(self, text: str) -> bool:
        """Whether the first line is this one of stderr."""
        return bool(self.lines) and self.lines[0][:2] == (text, True)

    def take(self) -> tuple[str, bool]:
        text, is_error, _ = self.lines.popleft()
        self.errors[text] -= is_error
        if not self.errors[text]:
            del self.errors[text]
        return text, is_error


class Screen:
    """Lines of several ranks, each put by a thread of its own."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Waiting] = {}
        self._printers: dict[int, Print] = {}
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None
        self._showing: list[str] = []  # lines whose turn it is, outermost first

    def open(self, rank: int, printer: Print) -> None:
        """Adds a rank, for whose lines the other ranks wait."""
        with self._lock:
            self._ranks[rank], self._printers[rank] = _Waiting(), printer

    def close(self, rank: int) -> None:
        """Notes that this rank prints no more lines."""
        with self._lock:
            self._ranks[rank].open = False
            self._lock.notify()

    def put(self, rank: int, text: str, is_error: bool) -> None:
        """Prints a line of a rank, now or in a second."""
        with self._lock:
            own = self._ranks[rank]
            if not is_error and not own.lines:
                self._print([rank], text, is_error)
                return
            own.put(text, is_error, time.monotonic() + WAIT_SECONDS)
            if is_error and all(text in each.errors for each in self._awaited(text)):
                self._show(text)
            elif len(own.lines) > _MOST_LINES:
                self._show_first(own)
            elif self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()
            else:
                self._lock.notify()

    def flush(self) -> None:
        """Prints all lines that wait; gives up after a second if they are not read."""
        thread = threading.Thread(target=self._flush, daemon=True)
        thread.start()
        thread.join(_BLOCK_SECONDS)

    def _flush(self) -> None:
        with self._lock:
            while waiting := [each for each in self._ranks.values() if each.lines]:
                self._show_first(waiting[0])

    def _awaited(self, text: str) -> Iterable[_Waiting]:
        """The ranks that have this line, or may print it yet."""
        return [e for e in self._ranks.values() if e.open or text in e.errors]

    def _show_first(self, of: _Waiting) -> None:
        """Prints the first line of a rank, once for all ranks that have it."""
        text, is_error, _ = of.lines[0]
        if is_error and text not in self._showing and len(self._showing) < _MOST_NESTED:
            self._show(text)
        else:
            self._print([self._number(of)], *of.take())

    def _show(self, text: str) -> None:
        """Prints a line of stderr once, after the lines that precede it."""
        self._showing.append(text)
        for each in self._ranks.values():
            while text in each.errors and not each.begins_with(text):
                self._show_first(each)
        having = [e for e in self._ranks.values() if e.begins_with(text)]
        for each in having:
            each.take()
        if having:
            self._print([self._number(each) for each in having], text, True)
        self._showing.pop()
        for each in having:
            while each.lines and not each.lines[0][1]:
                self._show_first(each)

    def _number(self, of: _Waiting) -> int:
        return next(rank for rank, each in self._ranks.items() if each is of)

    def _print(self, ranks: Sequence[int], text: str, is_error: bool) -> None:
        self._printers[ranks[0]](ranks, text, is_error)

    def _work(self) -> None:
        """Prints lines that have waited long enough."""
        with self._lock:
            while True:
                now = time.monotonic()
                dues = []
                for each in self._ranks.values():
                    while each.lines and self._is_due(each, now):
                        self._show_first(each)
                    dues += [each.lines[0][2]] if each.lines else []
                self._lock.wait(max(0.0, min(dues) - now) if dues else None)

    def _is_due(self, each: _Waiting, now: float) -> bool:
        text, _, until = each.lines[0]
        return until <= now or not any(
            other.open and text not in other.errors for other in self._ranks.values()
        )


def label(ranks: Sequence[int]) -> str:
    """Returns the prefix of a line of these ranks, such as ``[0-2,5] ``."""
    return f"[{describe(ranks)}] "
