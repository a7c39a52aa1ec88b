"""What of a line differs between ranks that run the same program: times, processes, bars."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_DIFFERS = re.compile(
    r"(?<=^[IWEF])\d{4} [\d:.]+ +\d+(?= )"  # absl: date, time, thread
    r"|\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d([.,]\d+)?(Z|[+-]\d\d:?\d\d)?"
    r"|\b\d\d:\d\d:\d\d([.,]\d+)?\b"
    r"|\b(?i:pid|process|thread|tid)[ =:#]*\d+\b"
    r"|\b0x[0-9a-f]{6,}\b"
)
_LEAST_PROCESS = 100  # smaller numbers mean something else in most lines
# A bar as tqdm draws it: "40%|####   | 2/5 [00:01<00:02, 1.9it/s]", or "2it [00:01, 1.9it/s]".
_BAR = re.compile(r"[^\r\n]*?\d(%\|[^|\r\n]*\||\w+ )[^\[\r\n]*\[[^\]\r\n]*\] *")


def common(text: str, process: int = 0) -> str:
    """Return a line of a rank without the parts that differ between ranks.

    Args:
        process: The rank's process number, which is left out, too.
    """
    text = _DIFFERS.sub("", text)  # first: absl's thread may have the process' number
    if process >= _LEAST_PROCESS:
        text = re.sub(rf"\b{process}\b", "", text)
    return text


def messages(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a stream without the bars that it draws.

    A bar ends in a carriage return, after which it is drawn anew; its last state ends in a
    newline. A message may follow it on that line.
    """
    draws = False
    for line in lines:
        if line.endswith("\r"):
            draws = True
            continue
        message = _BAR.sub("", line, count=1) if draws else line
        if message.strip() or not draws:
            yield message
        draws = False
