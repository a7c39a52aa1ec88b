"""The screen that the ranks of a host share: a line that all print on stderr is shown once.

A line of stderr waits for the same line of the other ranks, for a second at most, and the
later lines of its rank wait with it, so the lines of a rank keep their order. Each line
begins with the ranks that have printed it: ``[0]``, ``[0-3]``. Lines that differ only in
times or process numbers are the same.

Ranks may be seconds apart. If all run one program, the screen leaves out a line that another
rank has printed before; it is kept for the report of a rank that fails.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from collective.launch.cores import describe
from collective.launch.likeness import common

WAIT_SECONDS = 0.8
_BLOCK_SECONDS = 1.0
_MOST_LINES = 1000  # most waiting lines of a rank
_MOST_KNOWN = 10_000  # lines that are known to be on the screen
_KEPT_REPEATED = 100  # of a rank

# Prints a line of these ranks: the text, and whether it is from stderr.
Print = Callable[[Sequence[int], str, bool], None]


@dataclass(frozen=True)
class _Line:
    """A line that waits.

    Attributes:
        common: The text without what differs between ranks.
        until: When it waits no more.
    """

    text: str
    is_error: bool
    common: str
    until: float


class Screen:
    """Lines of several ranks, each put by a thread of its own.

    Args:
        one_program: Whether all ranks run one program and print the same.

    Attributes:
        repeated: By rank, its last lines that were left out.
    """

    def __init__(self, one_program: bool = False) -> None:
        self._one_program = one_program
        self.repeated: dict[int, collections.deque[str]] = {}
        # How often a line is on the screen, and how often each rank has printed it.
        self._shown = collections.Counter[str]()
        self._printed = collections.Counter[tuple[int, str]]()
        self._lines: dict[int, collections.deque[_Line]] = {}  # that wait, by rank
        self._printers: dict[int, Print] = {}
        self._open: set[int] = set()  # ranks that may print more
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None

    def open(self, rank: int, printer: Print) -> None:
        """Add a rank, for whose lines the other ranks wait."""
        with self._lock:
            self._lines[rank], self._printers[rank] = collections.deque(), printer
            self.repeated[rank] = collections.deque(maxlen=_KEPT_REPEATED)
            self._open.add(rank)

    def close(self, rank: int) -> None:
        """Note that this rank prints no more lines."""
        with self._lock:
            self._open.discard(rank)
            self._show_due(self._lines)

    def put(self, rank: int, text: str, is_error: bool, process: int = 0) -> None:
        """Print a line of a rank, at once or in a second.

        Args:
            process: The rank's process number, by which its lines may differ from others.
        """
        until = time.monotonic() + WAIT_SECONDS
        with self._lock:
            line = _Line(text, is_error, common(text, process), until)
            self._lines[rank].append(line)
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
            if self._lines[rank] and self._is_due(rank, self._lines[rank][0]):
                left += self._show_first(rank)

    def _is_due(self, rank: int, line: _Line) -> bool:
        if not line.is_error or line.text.endswith("\r"):  # a bar that is drawn anew
            return True
        if self._is_repeated(rank, line) or line.until <= time.monotonic():
            return True
        return all(self._begins_with(each, line) for each in self._open)

    def _is_repeated(self, rank: int, line: _Line) -> bool:
        """Return whether the screen has a line as often as the rank prints it, this time included."""
        printed = self._printed[rank, line.common]
        return self._one_program and printed < self._shown[line.common]

    def _begins_with(self, rank: int, line: _Line) -> bool:
        """Return whether the first line of a rank is this line of stderr."""
        lines = self._lines[rank]
        return bool(lines) and lines[0].is_error and lines[0].common == line.common

    def _show_first(self, rank: int) -> list[int]:
        """Print the first line of a rank once for all ranks with it; return these ranks."""
        line = self._lines[rank][0]
        if line.is_error and self._is_repeated(rank, line):
            self._lines[rank].popleft()
            self.repeated[rank].append(line.text)
            self._printed[rank, line.common] += 1
            return [rank]
        having = [each for each in self._lines if self._begins_with(each, line)]
        having = having if line.is_error else [rank]
        for each in having:
            self._lines[each].popleft()
        self._printers[rank](having, line.text, line.is_error)
        if line.is_error and self._one_program:
            self._note(having, line.common)
        return having

    def _note(self, ranks: Sequence[int], text: str) -> None:
        """Note that a line of these ranks is on the screen."""
        if len(self._shown) >= _MOST_KNOWN:
            self._shown.clear()
            self._printed.clear()
        self._shown[text] += 1
        for rank in ranks:
            self._printed[rank, text] += 1

    def _work(self) -> None:
        """Print lines that have waited long enough."""
        with self._lock:
            while True:
                self._show_due(self._lines)
                dues = [lines[0].until for lines in self._lines.values() if lines]
                left = min(dues, default=0.0) - time.monotonic()
                self._lock.wait(max(0.0, left) if dues else None)


def label(ranks: Sequence[int]) -> str:
    """Return the prefix of a line of these ranks, such as ``[0-2,5] ``."""
    return f"[{describe(ranks)}] "
