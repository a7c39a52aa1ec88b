"""The demo: our numbers are equal to one process, and differences are named."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests import launch

PATH = launch.ROOT / "examples" / "demo" / "__main__.py"


@pytest.fixture
def demo(monkeypatch):
    spec = importlib.util.spec_from_file_location("demo_of_examples", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.launches
@pytest.mark.matrix  # .ci/run prints the table itself, with make demo
@launch.NEEDS_CORE
def test_its_numbers_agree(demo, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(launch.ROOT))
    runs = [run for ways in demo.PROGRAMS.values() for run in ways]
    found = demo.outcomes(runs)
    for ways in demo.PROGRAMS.values():
        one, *others = (found[run] for run in ways)
        assert one.loss is not None, one.printed
        for run, other in zip(ways[1:], others, strict=True):
            text, is_well = demo.verdict(run, other, one)
            assert is_well, f"{run.command}: {other.printed}"
            assert text.startswith("equal") == run.is_ours, (run, text)


def test_what_it_makes_of_an_outcome(demo):
    one = demo.Outcome(0, "loss: 0.5\n")
    ours = demo.Run("ours", demo.OURS, "a.py")
    theirs = demo.Run("stock", demo.ONE, "a.py b", why="because")
    same, near = (demo.Outcome(0, f"loss: {loss}\n") for loss in (0.5, 0.5000001))
    assert demo.verdict(ours, same, one) == ("equal", True)
    assert demo.verdict(ours, near, one) == ("equal, 2e-07 apart by rounding", True)
    other = demo.Outcome(0, "[0] loss: 0.6\n")
    assert demo.verdict(ours, other, one) == ("another model, 0.2 apart: why?", False)
    assert demo.verdict(theirs, other, one) == (
        "another model, 0.2 apart: because",
        True,
    )
    crashed = demo.Outcome(1, "[0] ValueError: no\nloss: 0.5\n")
    assert demo.verdict(theirs, crashed, one) == ("ends with a ValueError", True)
    assert demo.verdict(ours, crashed, one) == ("ends with a ValueError", False)
