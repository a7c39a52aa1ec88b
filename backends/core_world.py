"""The MPI calls that ``tf-multiworker`` needs, by the native core.

So it runs without MPI where our launcher, srun or torchrun starts all ranks on one host.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

import numpy as np

from collective import library
from collective.environment import Environment


def can_serve(environment: Environment) -> bool:
    """Whether all ranks are on this host, and the core was built."""
    return (
        environment.launched
        and environment.size == environment.local_size
        and library.path().exists()
    )


class CoreWorld:
    """A communicator of all ranks, with mpi4py's names.

    Args:
        environment: This process' place.
    """

    def __init__(self, environment: Environment):
        import collective

        collective.init(environment)

    def allgather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        import collective

        mine = np.frombuffer(pickle.dumps(value), np.uint8)
        lengths = collective.allgather(np.array([mine.size]))
        parts = collective.allgather(mine)
        cuts = np.cumsum(lengths)[:-1]
        return [pickle.loads(part.tobytes()) for part in np.split(parts, cuts)]

    def Bcast(self, array: np.ndarray, root: int) -> None:
        """Overwrites an array by the root's; shapes and dtypes must agree."""
        import collective

        collective.broadcast(array, root, out=array, name="Bcast")

    def Barrier(self) -> None:
        """Waits for every rank."""
        import collective

        collective.barrier()

    def Free(self) -> None:
        """Does nothing: the core ends with the process."""

    def Abort(self, exit_code: int) -> None:
        """Ends this rank; the launcher then ends the others."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
