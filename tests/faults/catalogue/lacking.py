"""Ranks that do not get what they ask for: memory, shared memory, disk, files."""

from __future__ import annotations

import sys

from tests.faults.fault import Fault, training
from tests.faults.job import why_no_mounts
from tests.faults.undisturbed import as_undisturbed

TOLD = ("--json", "{folder}/json")

CORE = """
import resource, sys
import numpy as np
import collective
from pathlib import Path

def limit(more):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
"""
FAULTS = [
    Fault(
        "no memory left for one rank in a step (RLIMIT_AS)",
        training(model="wide"),
        "the job ends, and names the rank",
        code=1,
        seconds=10,
        told=("rank 1: error: out of memory", "HINT"),
        inside="lack-memory forward 1 5",
    ),
    Fault(
        "no memory left for the core on one rank (RLIMIT_AS)",
        [
            sys.executable,
            "-c",
            CORE
            + "limit(1 << 20 if int(__import__('os').environ['COLLECTIVE_RANK']) else 1 << 32); collective.init(); collective.allreduce(np.ones(9))",
        ],
        "the job ends, and names the rank",
        code=1,
        seconds=10,
        told=("HINT",),
    ),
    *(
        Fault(
            "/dev/shm is full (16 KB)",
            training(*TOLD, backend=backend),
            "the job goes on; the losses are the undisturbed ones",
            code=0,
            seconds=None,
            holds=as_undisturbed,
            backend=backend,
            shm="16k",
            needs=why_no_mounts,
        )
        for backend in ("native", "mpi", "tf-multiworker")
    ),
]
