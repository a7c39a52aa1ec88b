"""Ranks that do not do what the others do, or do not hold what the others hold."""

from __future__ import annotations

import sys
import textwrap

from tests.faults.fault import OPEN_MPIS, PROCESS_BACKENDS, Fault, training

BEFORE = """
import os, sys, time
import numpy as np
import collective

collective.init()
rank, size = collective.rank(), collective.size()
"""


def program(code: str) -> list[str]:
    """Return the program of every rank, which begins with ``collective.init()``."""
    return [
        sys.executable,
        "-c",
        BEFORE + textwrap.dedent(code).replace("{", "{{").replace("}", "}}"),
    ]


FIRST_STEP = "report forward 0 0"  # the seconds count from this point

FAULTS = [
    Fault(
        "one rank skips a collective, COLLECTIVE_TIMEOUT=3",
        program("""
            collective.allreduce(np.ones(3), name="first")
            if rank:
                time.sleep(1000)
            collective.allreduce(np.ones(3), name="second")
        """),
        "the job ends, and names who waits for whom in what",
        code=1,
        seconds=3 + 5,
        messages=(r"waited \d+ s for rank 1 in all-reduce 'second'", "HINT"),
        variables={"COLLECTIVE_TIMEOUT": "3"},
    ),
    Fault(
        "one rank skips a collective, and calls the next",
        program("""
            if not rank:
                collective.allreduce(np.ones(3), name="first")
            collective.allreduce(np.ones(5), name="second")
        """),
        "an error on every rank: who called what",
        code=1,
        seconds=5,
        messages=("'first' .*float64", "'second' .*float64", "HINT"),
    ),
    Fault(
        "one rank sends another shape",
        program("collective.allreduce(np.ones([2, 3 + rank]), name='weights')"),
        "an error on every rank: who has which",
        code=1,
        seconds=5,
        messages=(r"float64\[2,3\]", r"float64\[2,4\]", "HINT"),
    ),
    Fault(
        "one rank sends another type",
        program("collective.allreduce(np.ones(3, [np.float32, float][rank]))"),
        "an error on every rank: who has which",
        code=1,
        seconds=5,
        messages=(r"float32\[3\]", r"float64\[3\]", "HINT"),
    ),
    *(
        Fault(
            "one rank's data ends before its end",
            training(backend=backend, data="ends_early"),
            "the job ends, and names the rank",
            code=2,
            seconds=10,
            messages=(
                "rank 1: error: the data set has not as many rows as declared",
                "HINT",
            ),
            inside=FIRST_STEP,
            backend=backend,
        )
        for backend in PROCESS_BACKENDS
    ),
    Fault(
        "one rank has fewer rows than the others",
        training(data="fewer"),
        "refused before the first step; names the rank",
        code=2,
        seconds=30,
        messages=(
            "number of rows of the training data differs: 30 on rank 1, 53 on rank 0",
            "HINT",
        ),
    ),
    *(
        Fault(
            "NaN in one rank's data, `--terminate-on-nan`",
            training("--terminate-on-nan", backend=backend, data="not_a_number"),
            "the job ends before the step is applied; names step, rank and tensor",
            code=1,
            seconds=15,
            messages=(r"step \d: .* not finite on rank [01]", "HINT"),
            inside=FIRST_STEP,
            backend=backend,
        )
        for backend in PROCESS_BACKENDS
    ),
    *(
        Fault(
            "a bit of a weight flips on one rank",
            training("--check-every", "4", backend=backend, model="flipping"),
            "the next comparison ends the job; names the tensor, step and ranks",
            code=1,
            seconds=15,
            messages=("step 8: rank 1 has other values in", "HINT"),
            backend=backend,
        )
        for backend in PROCESS_BACKENDS
    ),
    Fault(
        "mpirun of one MPI, mpi4py of another",
        training(backend="mpi"),
        "refused before anything starts, with the mpirun to use",
        code=2,
        seconds=30,
        messages=("mpirun started 4 processes, but MPI", "HINT: use the mpirun"),
        backend="mpi",
        launcher="none",
        leaves=OPEN_MPIS,
        ranks=1,
        variables={"PMI_RANK": "0", "PMI_SIZE": "4"},  # as set by MPICH's mpirun
    ),
    Fault(
        "a rank does not start, COLLECTIVE_START_TIMEOUT=3",
        [
            sys.executable,
            "-c",
            "import os, time\nif os.environ['COLLECTIVE_RANK'] == '1': time.sleep(1000)\n"
            + BEFORE,
        ],
        "the job ends, and names the rank",
        code=1,
        seconds=3 + 5,
        messages=("local ranks did not come to init: 1", "HINT"),
        variables={"COLLECTIVE_START_TIMEOUT": "3"},
    ),
]
