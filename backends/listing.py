"""``train.py --list-backends``: every backend, and why it can or cannot be used."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from collective.backends.registry import BACKENDS, list_backends


def print_list(console: Console | None = None) -> None:
    """Prints the table."""
    table = Table(box=None, pad_edge=False)
    for column in ("backend", "usable here", "what it is"):
        table.add_column(column, overflow="fold")
    for name, found in list_backends().items():
        hint = f"\nHINT: {found.hint}" if found.hint else ""
        answer = "yes" if found.usable else "no"
        table.add_row(name, f"{answer}: {found.reason}{hint}", BACKENDS[name].summary)
    (console or Console(highlight=False, markup=False, emoji=False)).print(table)
