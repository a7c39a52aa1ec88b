"""``train.py --list-backends``: every backend, and how it can be used here."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator

from collective.backends.base import Availability
from collective.backends.registry import BACKENDS, can_start, list_backends

_NAME = 21  # columns of a name
_WIDTHS = (60, 100)  # of the whole, at least and at most

HERE = "Can be used in this process:"
STARTED = "Can be used here when started so:"
MISSING = "Cannot be used on this machine:"


def print_list() -> None:
    """Prints the backends in three groups; no line is wider than the terminal."""
    width = min(max(shutil.get_terminal_size().columns, _WIDTHS[0]), _WIDTHS[1])
    groups: dict[str, list[str]] = {HERE: [], STARTED: [], MISSING: []}
    for name, found in list_backends().items():
        group = _group(name, found)
        groups[group] += _entry(name, list(_texts(name, found, group)), width)
    print("\n\n".join("\n".join([g, *lines]) for g, lines in groups.items() if lines))


def _group(name: str, found: Availability) -> str:
    if found.usable:
        return HERE
    return STARTED if can_start(name, 2).usable else MISSING


def _texts(name: str, found: Availability, group: str) -> Iterator[str]:
    yield BACKENDS[name].summary
    if group == HERE:
        yield found.reason
    elif group == STARTED:
        yield f"{found.hint} (this is {found.reason})"
    else:
        missing = can_start(name, 2)
        yield f"{missing.reason}; HINT: {missing.hint}"


def _entry(name: str, texts: list[str], width: int) -> list[str]:
    """A backend's lines; only the first has its name."""
    lines: list[str] = []
    for text in texts:
        first = f"  {'' if lines else name:<{_NAME}}"
        lines += textwrap.wrap(
            text,
            width,
            initial_indent=first,
            subsequent_indent=" " * len(first),
            break_on_hyphens=False,
        )
    return lines
