"""What starts the ranks of each backend. Imports nothing, so that every file may use it."""

from __future__ import annotations

from typing import NamedTuple


class Start(NamedTuple):
    """How a job of a backend starts.

    Attributes:
        launcher: The program that starts its ranks; empty for a backend of one process.
        extra_ranks: Ranks that hold no replica.
        one_replica: Whether there is never more than one replica.
    """

    launcher: str = ""
    extra_ranks: int = 0
    one_replica: bool = False


STARTS = {
    "single": Start(one_replica=True),
    "tf-one-device": Start(one_replica=True),
    "tf-mirrored": Start(),
    "tf-central-storage": Start(),
    "tf-tpu": Start(),
    "tf-multiworker": Start("mpirun"),
    "tf-parameter-server": Start("mpirun", extra_ranks=2),  # a chief and one server
    "mpi": Start("mpirun"),
    "horovod": Start("horovodrun"),
    "native": Start("collectiverun"),
}


def ranks(backend: str, replicas: int) -> int:
    """How many processes to start for so many replicas; ``auto`` needs no more."""
    return replicas + STARTS.get(backend, Start()).extra_ranks
