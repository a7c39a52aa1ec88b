"""Programs that a loop which only resembles Keras' own trains otherwise: equal on two ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import launch
from tests.training.unedited.kinds_of_programs import PROGRAMS

SCRIPT = str(Path(__file__).with_name("kinds_of_programs.py"))
pytestmark = launch.STARTS_RANKS


def found(command: list[str], folder: Path) -> dict[str, Any]:
    """What each program gives."""
    env = launch.environment(forked=True, PYTHONHASHSEED="0")
    code, printed = launch.run([*command, SCRIPT], env, 240, folder)
    assert code == 0, printed
    lines = [line for line in printed.splitlines() if "FOUND " in line]
    return dict(json.loads(line.split("FOUND ", 1)[1]) for line in lines)


def flat(value: Any) -> Iterator[Any]:
    """Yield the numbers and texts of a tree."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from flat(one)
    else:
        yield value


#: Words for the launcher, and the tests in which they are.
LAUNCHES = [
    "-np 2",
    pytest.param("-np 3", marks=pytest.mark.matrix),
    pytest.param("-np 2 --set tensor_parallel=2", marks=pytest.mark.matrix),
]


@pytest.mark.parametrize("words", LAUNCHES)
def test_every_kind_is_as_stock(words, tmp_path):
    wanted = found([sys.executable], tmp_path)
    launcher = [sys.executable, "-m", "collective.launch", *words.split()]
    got = found([*launcher, "--keras"], tmp_path)
    assert set(wanted) == set(got) == set(PROGRAMS)
    for name, value in wanted.items():
        assert_same(name, got[name], value)


# Callbacks of ``collective.fit`` run on rank 0 alone; nothing seeds a script's generators.
REFUSED = ("pipeline_reads_a_variable_of_a_callback", "unseeded_generators")


@pytest.mark.matrix
def test_kinds_are_as_stock_by_calls_of_ours(tmp_path):
    wanted = found([sys.executable], tmp_path)
    launcher = [sys.executable, "-m", "collective.launch", "-np", "2"]
    script = str(Path(__file__).with_name("by_collective.py"))
    got = found([*launcher, sys.executable, script], tmp_path)
    assert set(wanted) == set(got) == set(PROGRAMS)
    for name, value in wanted.items():
        if name in REFUSED:
            assert "the training rows are others on rank 1" in str(got[name])
        else:
            assert_same(name, got[name], value)


def assert_same(name: str, ours: Any, theirs: Any) -> None:
    """Compare what a program gave on ranks with what it gave in stock Keras."""
    mine, stock = list(flat(ours)), list(flat(theirs))
    assert len(mine) == len(stock), (name, ours, theirs)
    for one, other in zip(mine, stock, strict=True):
        if isinstance(other, str):
            assert one == other, name
        else:
            np.testing.assert_allclose(one, other, 1e-9, 1e-12, err_msg=name)
