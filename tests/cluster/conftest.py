"""Nodes for the tests: made once, removed at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collective import library
from tests.cluster import nodes, slurm


@pytest.fixture(scope="session", autouse=True)
def permitted() -> None:
    reason = nodes.why_not()
    if not reason and not library.path().exists():
        reason = "the native core was not built"
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(permitted) -> Iterator[nodes.Nodes]:
    """Make four nodes; a job may use fewer."""
    with nodes.nodes(4) as made:
        yield made


@pytest.fixture(scope="session")
def job_variables(cluster) -> Iterator[dict[str, str]]:
    """Yield the variables of a shell in which srun and sbatch reach the nodes' Slurm."""
    if reason := slurm.why_not():
        pytest.skip(reason)
    with slurm.slurm(cluster) as variables:
        yield variables
