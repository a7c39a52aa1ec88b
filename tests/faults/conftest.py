"""Collects what was measured, and writes the table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import table
from tests.faults.catalogue import FAULTS
from tests.hosts import lab


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", metavar="FILE", help="put the table of faults there")


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest) -> Iterator[list[table.Measured]]:
    """What each fault took; the table is made of it."""
    found: list[table.Measured] = []
    yield found
    if file := request.config.getoption("--table"):
        table.write(Path(file), FAULTS, found)


@pytest.fixture(scope="session")
def hosts() -> Iterator[lab.Lab]:
    """Two hosts on this machine."""
    with lab.hosts(2, "10gbit") as made:
        yield made
