"""Slurm's short form of many names: ``node[01-04,7]`` is node01 to node04 and node7.

The package python-hostlist reads it, too. It is not used: its licence is the GPL, which
does not fit this project's.
"""

from __future__ import annotations

import itertools
import re

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
MOST_NAMES = 100_000


def split(text: str) -> list[str]:
    """Splits at the commas that stand outside brackets.

    Raises:
        ValueError: If the brackets do not match.
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"the brackets of {text!r} do not match")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise ValueError(f"the brackets of {text!r} do not match")
    return parts


def expand(text: str) -> list[str]:
    """The names that one short form stands for; a plain name is itself.

    Raises:
        ValueError: If it is not well formed.
    """
    pieces: list[list[str]] = []
    count, end = 1, 0
    for found in _BRACKETS.finditer(text):
        pieces += [[text[end : found.start()]], _numbers(found[1])]
        count *= len(pieces[-1])
        end = found.end()
        if count > MOST_NAMES:
            raise ValueError(f"{text!r} stands for over {MOST_NAMES} names")
    pieces.append([text[end:]])
    if any(set("[]") & set(piece[0]) for piece in pieces):
        raise ValueError(f"the brackets of {text!r} do not match")
    return ["".join(parts) for parts in itertools.product(*pieces)]


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"[{text}] is not a list of numbers like [01-04,7]")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise ValueError(f"the range {part} runs backwards")
        if int(last) - int(first) >= MOST_NAMES:
            raise ValueError(f"the range {part} holds over {MOST_NAMES} numbers")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers
