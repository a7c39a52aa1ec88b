"""One host of a job, and the error for a bad description of it."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from collective.errors import UsageError

_SHOWN = 150  # characters of either end of a long text
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?\.?")
_ZONE = re.compile(r"[A-Za-z0-9._-]+")
_USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*[$]?")


class HostError(UsageError):
    """A description of hosts that cannot be read.

    Args:
        source: File, variable or option with the error.
        line: Number of the line, from 1; 0 if there are no lines.
        found: The wrong text.
        expected: The text that is valid there.
    """

    def __init__(self, source: str, line: int, found: str, expected: str):
        where = f"{source}, line {line}" if line else source
        long = len(found) > 2 * _SHOWN
        shown = f"{found[:_SHOWN]}...{found[-_SHOWN:]}" if long else found
        super().__init__(f"{where}: {shown}", hint=expected)


@dataclass(frozen=True)
class Host:
    """A machine and the number of processes that it takes."""

    name: str  # name or address; an IPv6 address without brackets
    # Number of processes that it takes; None if it is not given.
    slots: int | None = None
    max_slots: int | None = None  # upper limit of ``slots``; None for no limit
    user: str = ""  # the user to log in as; empty for this user

    def __post_init__(self) -> None:
        if not (is_name(self.name) or is_ipv6(self.name)):
            raise ValueError(f"{self.name!r} is not the name or address of a host")
        if self.user and not _USER.fullmatch(self.user):
            raise ValueError(f"{self.user!r} is not a user name")

    @property
    def login(self) -> str:
        """Return the address for ssh: ``name`` or ``user@name``."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def bracketed(self) -> str:
        """Return ``login`` with brackets around an IPv6 address, so that a colon may follow."""
        if ":" not in self.name:
            return self.login
        return self.login.replace(self.name, f"[{self.name}]")


def is_name(text: str) -> bool:
    """Return whether this is a host's name or IPv4 address."""
    return bool(_NAME.fullmatch(text)) and len(text) < 254


def is_ipv6(text: str) -> bool:
    """Return whether this is an IPv6 address; it may have a zone (``fe80::1%eth0``)."""
    address, percent, zone = text.partition("%")
    if percent and not _ZONE.fullmatch(zone):  # ipaddress takes any text
        return False
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


def is_local(host: Host) -> bool:
    """Return whether a host is this machine, by its name or by an address of ours.

    A host with a user name does not count: a process there runs as another user.
    """
    if host.user:
        return False
    if host.name in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(host.name, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)  # this works only with an address of ours
            return True
        except OSError:
            continue
    return False


def merged(hosts: Iterable[Host]) -> list[Host]:
    """Return each host once, in order of appearance.

    A host that is named twice has the slots of both lines, as under mpirun; a line without
    slots then counts as one.
    """
    found: dict[str, Host] = {}
    for host in hosts:
        before = found.get(host.login)
        if before is not None:
            slots = (before.slots or 1) + (host.slots or 1)
            limits = [h.max_slots for h in (before, host) if h.max_slots is not None]
            limit = max(slots, sum(limits)) if limits else None
            host = dataclasses.replace(before, slots=slots, max_slots=limit)
        found[host.login] = host
    return list(found.values())
