"""What the ranks print: whole lines, prefixed on the screen, or in files."""

from __future__ import annotations

import codecs
import collections
import contextlib
import datetime
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from collective.errors import printable

KEPT_LINES = 200
_SHOWN_LINES = 60
_WITHOUT_TRACEBACK = 12
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Style:
    """How output is shown.

    Attributes:
        prefix: Whether each line begins with the number of its rank.
        timestamp: Whether it begins with the time, too.
        directory: Where ``rank.NN/stdout`` and ``stderr`` go instead of the screen.
    """

    prefix: bool = True
    timestamp: bool = False
    directory: Path | None = None

    @property
    def captures(self) -> bool:
        """Whether output passes through us at all."""
        return self.prefix or self.timestamp or self.directory is not None


class Output:
    """The two streams of one rank.

    Args:
        rank: Its number.
        size: Number of ranks, for the width of numbers in file names.
        style: How to show it.

    Raises:
        OSError: If its files cannot be written.
    """

    def __init__(self, rank: int, size: int, style: Style):
        self.rank, self.style = rank, style
        self.last: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._threads: list[threading.Thread] = []
        self._pipes: list[tuple[IO[bytes], IO[str], bool]] = []
        self._files: list[IO[str]] = []
        if style.directory is not None:
            width = len(str(max(size - 1, 0)))
            folder = style.directory / f"rank.{rank:0{width}}"
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("stdout", "stderr"):
                self._files.append((folder / name).open("w", encoding="utf-8"))

    def attach(self, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> None:
        """Takes the pipes of the rank's process; ``start`` begins to read them."""
        screens = (sys.stdout, sys.stderr)
        for pipe, target in zip((stdout, stderr), self._files or screens, strict=True):
            if pipe is not None:
                self._pipes.append((pipe, target, pipe is stderr))

    def start(self) -> None:
        """Begins to copy, in threads."""
        for pipe, target, is_error in self._pipes:
            copy = threading.Thread(
                target=self._copy, args=(pipe, target, is_error), daemon=True
            )
            copy.start()
            self._threads.append(copy)

    def finish(self, seconds: float) -> None:
        """Waits for the rest; a process that outlives its rank may hold a pipe."""
        for thread in self._threads:
            thread.join(seconds)
        for file in self._files:
            with contextlib.suppress(OSError):
                file.flush()

    def _copy(self, pipe: IO[bytes], target: IO[str], is_error: bool) -> None:
        label = f"[{self.rank}] " if self.style.prefix and not self._files else ""
        for line in lines(pipe):
            if is_error:
                self.last.append(line)
            # A reader that is gone must not end the job.
            with contextlib.suppress(OSError, ValueError):
                target.write(self._stamp() + label + line)
                target.flush()

    def _stamp(self) -> str:
        if not self.style.timestamp:
            return ""
        now = datetime.datetime.now().astimezone()
        return now.isoformat(" ", "milliseconds") + " "


def lines(pipe: IO[bytes]) -> Iterator[str]:
    """Whole lines of a pipe, ended by newline or return; the last gets a newline."""
    rest = ""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := os.read(pipe.fileno(), 1 << 16):
        pieces = (rest + decoder.decode(data)).splitlines(keepends=True) or [""]
        rest = "" if pieces[-1].endswith(("\n", "\r")) else pieces.pop()
        yield from pieces
    if rest:
        yield f"{rest}\n"


def last_words(errors: Iterable[str]) -> list[str]:
    """The last traceback of a rank's error stream; without one, its last lines."""
    kept = [line.rstrip("\r\n") for line in errors]
    kept = [line for line in kept if line.strip()]
    starts = [i for i, line in enumerate(kept) if _TRACEBACK in line]
    if not starts:
        return kept[-_WITHOUT_TRACEBACK:]
    found = kept[starts[-1] :]
    # "During handling of the above exception": the first cause is not the last word.
    if len(found) > _SHOWN_LINES:
        half = _SHOWN_LINES // 2
        found = [*found[:half], "  ...", *found[-half:]]
    return found


def tell(text: str) -> None:
    """Prints a message of the launcher's own."""
    with contextlib.suppress(OSError):
        print(f"collective.launch: {printable(text)}", file=sys.stderr, flush=True)


def report(who: str, how: str, errors: Iterable[str]) -> None:
    """Says, as the last thing on the screen, who failed, with its traceback.

    Args:
        who: The rank, as ``rank 1 of 4``.
        how: As ``with 7`` or ``by SIGKILL``.
        errors: The last lines of its error stream.
    """
    words = last_words(errors)
    if words:
        tell("\n".join([f"the last that {who} wrote to stderr:", *words]))
    tell(f"{who} failed: it ended {how}")
