"""The same files run as one rank, and as several ranks under the launcher."""

import os

import pytest

os.environ.setdefault("COLLECTIVE_TIMEOUT", "240")
os.environ.setdefault("COLLECTIVE_STALL_SECONDS", "20")

import collective
from collective import library


def pytest_collection_modifyitems(items):
    if library.path().exists():
        return
    for item in items:
        if "needs_core" in item.fixturenames:
            item.add_marker(pytest.mark.skip(reason="the native core was not built"))


@pytest.fixture(scope="session")
def needs_core():
    """Join the job."""
    collective.init()
    yield
    collective.shutdown()


@pytest.fixture(scope="session")
def hvd(needs_core):
    """Return Horovod's interface, in the job."""
    pytest.importorskip("tensorflow")
    import collective.tensorflow as hvd

    hvd.init()
    return hvd


@pytest.fixture(scope="session")
def rank(needs_core):
    return collective.rank()


@pytest.fixture(scope="session")
def size(needs_core):
    return collective.size()
