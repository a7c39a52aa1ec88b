"""The hosts that a batch system has allocated to the job around this process.

Slurm names them in variables, LSF, PBS and Grid Engine in a file.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from collective.errors import UsageError
from collective.hosts import slurm
from collective.hosts.host import Host, HostError
from collective.hosts.reading import read_text


@dataclass(frozen=True)
class Allocation:
    """The hosts that a batch system gave to this job."""

    system: str
    hosts: Sequence[Host]  # each with its number of slots


def find_allocation(variables: Mapping[str, str]) -> Allocation | None:
    """Return the allocation around a process with these variables; None if there is none.

    Raises:
        UsageError: If the list of hosts cannot be read, or is malformed.
    """
    if hosts := slurm.allocation(variables):
        return Allocation("Slurm", hosts)
    for system, variable, read in (
        ("LSF", "LSB_DJOB_HOSTFILE", _line_per_slot),
        ("PBS", "PBS_NODEFILE", _line_per_slot),
        ("Grid Engine", "PE_HOSTFILE", _slots_in_line),
    ):
        if file := variables.get(variable):
            return Allocation(system, _read(file, variable, read))
    return None


def _read(
    file: str, variable: str, read: Callable[[list[str]], dict[str, int]]
) -> list[Host]:
    try:
        lines = [line for line in read_text(file).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the hosts of the job, {variable}={file}: {error}",
            hint="start the job on the first host of the allocation, or give the hosts: "
            "-H node1:2,node2:2",
        ) from None
    try:
        hosts = [Host(name, slots) for name, slots in read(lines).items()]
    except (ValueError, IndexError) as error:
        raise HostError(f"{variable}={file}", 0, str(error), "-H node1:2") from None
    if not hosts:
        raise HostError(f"{variable}={file}", 0, "no hosts in it", "-H node1:2")
    return hosts


def _line_per_slot(lines: list[str]) -> dict[str, int]:
    """Count each host's lines; a host has one for each slot, not always in succession."""
    return collections.Counter(line.strip() for line in lines)


def _slots_in_line(lines: list[str]) -> dict[str, int]:
    """Add up the slots in lines ``node1 4 all.q@node1 UNDEFINED``, one for each queue."""
    found: dict[str, int] = {}
    for name, slots, *_ in (line.split() for line in lines):
        if not (slots.isascii() and slots.isdigit() and int(slots) > 0):
            raise ValueError(f"{slots!r} after {name} is not a number of slots")
        found[name] = found.get(name, 0) + int(slots)
    return found
