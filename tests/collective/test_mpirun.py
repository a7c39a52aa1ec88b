"""The other tests under mpirun: as one host, and as hosts that only MPI joins."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from collective import library
from tests import launch

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(
        any(name in os.environ for name in ("COLLECTIVE_RANK", "OMPI_COMM_WORLD_RANK")),
        reason="runs within a launch itself",
    ),
    pytest.mark.skipif(not library.path().exists(), reason="the core was not built"),
    pytest.mark.skipif(
        not library.NATIVE.joinpath("libcollective_openmpi.so").exists()
        or shutil.which("mpirun") is None,
        reason="no Open MPI with its mpicxx when the core was built",
    ),
]
FILES = ("allreduce", "others", "process_sets", "agreement", "order", "join")
# As MPI tells the ranks of a host: told each that it is alone on one.
ALONE = ["env", "OMPI_COMM_WORLD_LOCAL_SIZE=1", "OMPI_COMM_WORLD_LOCAL_RANK=0"]


@pytest.mark.parametrize(
    ("size", "prefix", "what"),
    [
        (3, [], "dtype or set"),
        (
            2,
            ALONE,
            "not float32 and not megabytes and not threads and not in_a_function "
            "and not gathered_beside",
        ),
        (
            3,
            ALONE,
            "dtype or transport or of_each or set or first_rank_joins and not in_a_"
            "function",
        ),
    ],
)
def test_the_other_tests(size, prefix, what):
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in FILES]
    code, output = launch.run(
        [
            *[*launch.command("mpi", size), *prefix, sys.executable],
            *["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--color=no"],
            *["-k", what, *files],
        ],
        launch.environment(),
        seconds=150,
    )
    assert code == 0, output[-5000:]
    assert output.count(" passed") == size
