"""Ranks that do not get what they ask for: memory, shared memory, disk, files."""

from __future__ import annotations

from collections.abc import Sequence

from tests.faults.catalogue.wrong import program
from tests.faults.fault import JSON, PROCESS_BACKENDS, Fault, training
from tests.faults.job import why_no_mounts
from tests.faults.undisturbed import as_undisturbed

# On rank 1, the core cannot map memory.
CORE = program("""
    import resource
    from pathlib import Path

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    if rank:
        most = pages * resource.getpagesize() + (1 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    collective.allreduce(np.ones(9))
""")


def no_memory(
    whose: str, program: Sequence[str], *messages: str, inside: str = ""
) -> Fault:
    return Fault(
        f"no memory left for {whose} on one rank",
        program,
        "the job ends, and names the rank",
        code=1,
        seconds=10,
        messages=(*messages, "HINT"),
        inside=inside,
    )


OUT = "rank 1: error: out of memory"
FAULTS = [
    # It tries again for ten seconds before it gives up.
    no_memory(
        "TensorFlow", training(model="growing"), OUT, inside="grow forward 1 5"
    ).but(seconds=20),
    no_memory("the user's code", training(), OUT, inside="ask-for-memory forward 1 5"),
    no_memory("the core", CORE, "rank 1: mmap: Cannot allocate memory"),
    *(
        Fault(
            "/dev/shm is full (16 KB)",
            training(*JSON, backend=backend),
            "the job continues; the losses are the undisturbed ones",
            code=0,
            seconds=None,
            holds=as_undisturbed,
            backend=backend,
            shm="16k",
            needs=why_no_mounts,
        )
        for backend in PROCESS_BACKENDS
    ),
]
