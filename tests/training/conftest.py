"""Which step the tests of a folder are about."""

from __future__ import annotations

from pathlib import Path

import pytest

# What they test is the step of parts, which other backends and options still have.
OF_PARTS = {"coupled", "custom_step", "verification"}
FILES = {
    "test_step.py",
    "test_wrapped_functions.py",
}


@pytest.fixture(autouse=True)
def step_of_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    path = Path(request.node.path)
    if OF_PARTS & set(path.parts) or path.name in FILES:
        monkeypatch.setenv("COLLECTIVE_PARTITION", "0")
