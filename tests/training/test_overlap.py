"""Buckets of gradients travel while the backward pass continues."""

import sys

import pytest

from tests import launch

SCRIPT = launch.ROOT / "tests/training/ranks_overlapping.py"


@pytest.mark.launches
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("native", marks=launch.NEEDS_CORE),
        pytest.param("tf-multiworker", marks=pytest.mark.matrix),
        pytest.param("mpi", marks=pytest.mark.matrix),
        pytest.param("horovod", marks=pytest.mark.horovod),
    ],
)  # fmt: skip
def test_a_bucket_is_summed_while_the_next_is_computed(backend):
    command = [*launch.command(backend, 2), sys.executable, str(SCRIPT), backend]
    code, printed = launch.run(command, launch.environment(forked=True), 100)
    assert code == 0, printed
    assert printed.count("1 sum leaves early") == 2, printed
