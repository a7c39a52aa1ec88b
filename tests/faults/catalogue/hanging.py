"""Ranks that live and make no progress: ``collectiverun --rank-timeout``."""

from __future__ import annotations

from tests.faults.catalogue.killed import KEPT, RESUMED
from tests.faults.catalogue.survived import undisturbed
from tests.faults.fault import JSON, OPEN_MPIS, Fault, training
from tests.faults.undisturbed import as_undisturbed, goes_on_from_checkpoint

SECONDS = 15  # longer than one rank may be later than the others in init
WORDS = ("--min-np", "2", "--rank-timeout", str(SECONDS))
FOREVER = {"FAULT_SECONDS": "100000"}
KILLED = r"for rank {} \(process \d+\), which waits for nobody: killed it"
NOT_IN_INIT = '[ "$COLLECTIVE_RANK" != 1 ] || sleep 1000; exec "$@"'


def hanging(name: str, inside: str, backend: str = "native") -> Fault:
    """Return a fault in which rank 1 of 3 hangs."""
    by_mpi = backend == "mpi"
    stuck = r"rank 1 on \S+ makes no progress" if by_mpi else KILLED.format(1)
    return Fault(
        f"{name}, --min-np 2, --rank-timeout {SECONDS}",
        training(*KEPT, *JSON, backend=backend),
        "it is killed, and the others continue; the losses are the undisturbed ones, and "
        "the ledger is perfect",
        code=0,
        seconds=None,
        messages=(stuck,),
        inside=inside,
        holds=undisturbed,
        backend=backend,
        launcher="collectiverun --mpi" if by_mpi else "",
        launcher_options=("--mpi", *WORDS) if by_mpi else WORDS,
        leaves=OPEN_MPIS if by_mpi else "",
        ranks=3,
        variables=FOREVER,
    )


FAULTS = [
    hanging("SIGSTOP to a rank, for ever", "stop forward 1 7"),
    hanging("SIGSTOP to a rank in all-reduce, for ever", "stop all-reduce 1 7"),
    hanging("a rank hangs in its own code", "sleep forward 1 7"),
    hanging("a rank hangs in its own code", "sleep forward 1 7", "mpi"),
    hanging("a rank never releases Python's lock", "hold-lock forward 1 7"),
    hanging("SIGSTOP to a rank in all-reduce, for ever", "stop all-reduce 1 7", "mpi"),
    Fault(
        f"SIGSTOP to two ranks of three, --min-np 2, --rank-timeout {SECONDS}",
        training(*KEPT),
        f"they are killed; fewer are left than may be: the job ends; {RESUMED}",
        code=1,
        seconds=2 * SECONDS + 10,
        messages=(KILLED.format(1), KILLED.format(2)),
        inside="stop forward 1,2 7",
        holds=goes_on_from_checkpoint,
        launcher_options=WORDS,
        ranks=3,
    ),
    Fault(
        "a rank hangs before init, --min-np 2, --rank-timeout 15",
        ["sh", "-c", NOT_IN_INIT, "sh", *training(*JSON)],
        "it is killed, and the others begin; the losses are the undisturbed ones",
        code=0,
        seconds=None,
        messages=(r"rank 1 has not called collective.init\(\) within 15 s",),
        holds=as_undisturbed,
        launcher_options=("--min-np", "2", "--rank-timeout", "15"),
        ranks=3,
    ),
]
