"""Collects the measurements, and writes the table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import table
from tests.faults.catalogue import SECTIONS
from tests.hosts import lab


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", metavar="FILE", help="put the table of faults there")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests: jobs that wait run in sequence, next to jobs that use processors.

    pytest-xdist cuts the list into as many pieces as there are workers: the last piece
    begins with the waiting jobs.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    waiting = [item for item in items if item.get_closest_marker("waits")]
    others = [item for item in items if item not in waiting]
    begin = len(items) * (workers - 1) // workers
    items[:] = others[:begin] + waiting + others[begin:]


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest) -> Iterator[list[table.Measured]]:
    """Collect the time of each fault, for the table."""
    found: list[table.Measured] = []
    yield found
    if file := request.config.getoption("--table"):
        table.write(Path(file), SECTIONS, found)


@pytest.fixture(scope="session")
def hosts() -> Iterator[lab.Lab]:
    """Make two hosts on this machine."""
    with lab.hosts(2, "10gbit") as made:
        yield made
