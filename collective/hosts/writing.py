"""Writes a list of hosts in the dialects that launchers read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from collective.errors import UsageError
from collective.hosts.host import Host


def _openmpi(host: Host) -> str:
    limit = f" max_slots={host.max_slots}" if host.max_slots else ""
    return (f"{host.login} slots={host.slots}" if host.slots else host.login) + limit


def _mpich(host: Host) -> str:
    if ":" in host.name:  # MPICH's mpirun dies by SIGFPE
        raise UsageError(
            f"MPICH's mpirun takes no IPv6 address like {host.name}",
            hint="give the host's name instead",
        )
    return _item(host)


def _item(host: Host) -> str:
    return f"{host.bracketed}:{host.slots}" if host.slots else host.bracketed


DIALECTS: dict[str, Callable[[Host], str]] = {
    "openmpi": _openmpi,
    "mpich": _mpich,
    "list": _item,
}


def write(hosts: Sequence[Host], dialect: str) -> str:
    """Return the text of a hostfile, or of ``-H`` (dialect ``list``).

    A limit (``max_slots``) is dropped if the dialect has no limits.

    Raises:
        UsageError: The dialect cannot describe these hosts.
    """
    written = [DIALECTS[dialect](host) for host in hosts]
    return ",".join(written) if dialect == "list" else "\n".join([*written, ""])
