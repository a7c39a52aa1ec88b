"""Keras calls hooks, resets metrics and reads data in its own order on ranks, too."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import launch

SCRIPT = str(Path(__file__).with_name("hooks_script.py"))
pytestmark = [pytest.mark.launches, pytest.mark.matrix, launch.NEEDS_CORE]


def programs(words: list[str]) -> dict[str, tuple[list[str], list[str]]]:
    """Return the calls and the reads of each program of the script."""
    code, printed = launch.run(words, launch.environment(forked=True), 200)
    assert code == 0, printed
    lines = [line.partition("PROGRAM ")[2] for line in printed.splitlines()]
    found = [json.loads(line) for line in lines if line]
    return {name: (calls, reads) for name, calls, reads in found}


def test_hooks_are_called_in_the_order_of_keras():
    """In 45 programs: arrays, data sets, items, generators, validation, errors, stops."""
    stock = programs([sys.executable, SCRIPT])
    ours = programs([*launch.command("native", 2), "--keras", SCRIPT])
    assert len(stock) == 45
    for name, (calls, reads) in stock.items():
        got, read = ours[name]
        assert got == calls, name
        # A thread may have read one batch more when the program ends.
        both = min(len(read), len(reads))
        assert read[:both] == reads[:both] and max(len(read), len(reads)) < both + 4, (
            name
        )
