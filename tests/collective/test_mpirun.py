"""The other tests under mpirun: as one host, and as hosts that only MPI joins."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from collective import library

ROOT = Path(__file__).parents[2]
pytestmark = [
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
FILES = ("test_allreduce.py", "test_others.py", "test_process_sets.py")
# As MPI tells the ranks of a host: told each that it is alone on one.
ALONE = ["env", "OMPI_COMM_WORLD_LOCAL_SIZE=1", "OMPI_COMM_WORLD_LOCAL_RANK=0"]


@pytest.mark.parametrize(
    ("size", "prefix", "what"),
    [
        (3, [], "dtype or set"),
        (2, ALONE, "not float32 and not megabytes"),
        (3, ALONE, "dtype or transport or of_each or set"),
    ],
)
def test_the_other_tests(size, prefix, what):
    result = subprocess.run(
        [
            *["mpirun", "--oversubscribe", "-np", str(size), *prefix, sys.executable],
            *["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--color=no"],
            *["-k", what, *(str(Path(__file__).parent / file) for file in FILES)],
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert result.stdout.count(" passed") == size
