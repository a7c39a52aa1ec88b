"""The other tests under mpirun, as one host and as hosts that only MPI connects."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests import launch

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(
        any(name in os.environ for name in ("COLLECTIVE_RANK", "OMPI_COMM_WORLD_RANK")),
        reason="runs within a launch itself",
    ),
    launch.NEEDS_CORE,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun"),
]
FILES = ("allreduce", "data_movement", "process_sets", "agreement", "order", "join")
# MPI's local numbers of ranks, for ranks that are alone on their hosts.
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


# Ranks 0 and 1 on one host, rank 2 alone on another.
UNEQUAL = [
    "sh",
    "-c",
    'if [ "$OMPI_COMM_WORLD_RANK" = 2 ]; then size=1 rank=0; '
    "else size=2 rank=$OMPI_COMM_WORLD_RANK; fi; "
    "export OMPI_COMM_WORLD_LOCAL_SIZE=$size OMPI_COMM_WORLD_LOCAL_RANK=$rank; "
    'exec "$@"',
    "sh",
]
# Every partial sum, and a third of it, is exact in 16 bits.
SIXTEEN_BITS = """
import ml_dtypes, numpy as np, collective
collective.init()
assert collective.size() == 3
for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
    for length in (1, 1000, 300_000):
        multiples = 3 * (1 + np.arange(length) % 3)
        for algorithm in ("auto", "direct", "hierarchical"):
            array = (multiples * (1 + collective.rank())).astype(dtype)
            for op, factor in (
                (collective.Average, 2), (collective.Sum, 6), (collective.Max, 3)
            ):
                result = collective.allreduce(array, op, algorithm=algorithm)
                expected = (multiples * factor).astype(dtype)
                assert (result == expected).all(), (dtype, length, algorithm, op)
print("equal")
"""


def run_script(size: int, prefix: list[str], script: str) -> tuple[int, str]:
    command = [*launch.command("mpi", size), *prefix, sys.executable, "-c", script]
    return launch.run(command, launch.environment(), seconds=100)


def test_averages_on_hosts_of_unequal_size():
    code, output = run_script(3, UNEQUAL, SIXTEEN_BITS)
    assert code == 0, output[-3000:]
    assert output.count("equal") == 3


THREAD_LEVEL = """
import sys
import mpi4py
mpi4py.rc.thread_level = sys.argv[1]
from mpi4py import MPI
import numpy as np, collective
world = MPI.COMM_WORLD
received = np.zeros(1, np.int32)
other = 1 - world.Get_rank()
receive = world.Irecv(received, MPI.ANY_SOURCE, MPI.ANY_TAG)
try:
    collective.init()
except collective.CollectiveError as error:
    print("refused:", error)
else:
    total = collective.allreduce(np.array([1.0 + world.Get_rank()]), collective.Sum)
    assert total[0] == 3
    print("summed")
world.Send(np.array([7 + world.Get_rank()], np.int32), other, 5)
receive.Wait()
assert received[0] == 7 + other, received
"""


@pytest.mark.parametrize("level", ["serialized", "multiple"])
def test_a_program_that_has_started_mpi(level):
    """The program's own receives never get the core's messages."""
    pytest.importorskip("mpi4py")
    script = THREAD_LEVEL.replace("sys.argv[1]", repr(level))
    code, output = run_script(2, ALONE, script)
    assert code == 0, output[-3000:]
    if level == "multiple":
        assert output.count("summed") == 2, output
    else:
        assert output.count("refused:") == 2, output
        assert "has started MPI without MPI_THREAD_MULTIPLE" in output
        assert "HINT: " in output
