"""Each test of scripts begins and ends with Keras as it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


def undo() -> None:
    module = sys.modules.get("collective.training.unedited.distribute")
    found = getattr(module, "_distribution", None)
    if found is not None:
        found.undo()


@pytest.fixture(autouse=True)
def undistributed() -> Iterator[None]:
    """Undo what an earlier test, or this one, has left distributed."""
    undo()
    yield
    undo()
