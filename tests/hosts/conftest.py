"""Hosts for the tests: made once, removed at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collective import library
from tests.hosts import lab


@pytest.fixture(scope="session", autouse=True)
def permitted() -> None:
    reason = lab.why_not()
    if not reason and not library.path().exists():
        reason = "the native core was not built"
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def hosts(permitted) -> Iterator[lab.Lab]:
    """Make four hosts; a job may use fewer."""
    with lab.hosts(4, "10gbit") as made:
        yield made
