"""Network interfaces of this host, and the addresses at which hosts reach each other."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collective.errors import UsageError

_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
VARIABLE = "COLLECTIVE_INTERFACES"


@dataclass(frozen=True)
class Interface:
    """An address of this host.

    Attributes:
        name: As the system calls the interface.
        address: IPv4, with the length of its network's prefix: ``10.0.0.2/24``.
    """

    name: str
    address: str

    @property
    def host(self) -> str:
        """The address alone."""
        return self.address.partition("/")[0]

    @property
    def network(self) -> str:
        """The network, ``10.0.0.0/24``."""
        return str(ipaddress.ip_interface(self.address).network)


def interfaces() -> list[Interface]:
    """The IPv4 addresses of this host that others might reach; the default's first."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:

        def ask(what: int, name: str) -> bytes:
            return fcntl.ioctl(asked, what, struct.pack("256s", name.encode()[:15]))

        for _, name in socket.if_nameindex():
            try:
                flags = struct.unpack("H", ask(_SIOCGIFFLAGS, name)[16:18])[0]
                if not flags & _IFF_UP or flags & _IFF_LOOPBACK:
                    continue
                address = socket.inet_ntoa(ask(_SIOCGIFADDR, name)[20:24])
                mask = socket.inet_ntoa(ask(_SIOCGIFNETMASK, name)[20:24])
            except OSError:
                continue  # it has no IPv4 address
            length = ipaddress.ip_network(f"0.0.0.0/{mask}").prefixlen
            found.append(Interface(name, f"{address}/{length}"))
    default = _default_address()
    return sorted(found, key=lambda interface: interface.host != default)


def _default_address() -> str:
    """The address this host would send from, to somewhere else; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # kept free for documentation: RFC 5737
            return probe.getsockname()[0]
        except OSError:
            return ""


def name_of(address: str) -> str:
    """The interface with an address, IPv4 or IPv6; empty for none (loopback too)."""
    if ":" not in address:
        return next((i.name for i in interfaces() if i.host == address), "")
    digits = ipaddress.IPv6Address(address.partition("%")[0]).exploded.replace(":", "")
    try:
        known = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""  # this system has no IPv6
    fields = (line.split() for line in known)
    return next((f[5] for f in fields if f[0] == digits and f[5] != "lo"), "")


def wanted(variables: Mapping[str, str] | None = None) -> list[str]:
    """The interfaces that the user named, by ``--network-interfaces``."""
    env = os.environ if variables is None else variables
    return [name for name in env.get(VARIABLE, "").split(",") if name]


def addresses(hosts: Sequence[Sequence[Interface]], names: Sequence[str]) -> list[str]:
    """For each rank the address at which the ranks of other hosts reach it.

    It is one in a network that every host is in. An address that several hosts have,
    as that of a container bridge, leads nowhere and is passed over. Where no network
    is common to all, routers lie between: each host's first address then.

    Args:
        hosts: The interfaces of the host of each rank, the best first; ranks of one
            host have the same.
        names: Interfaces that the user named; empty for all.

    Raises:
        UsageError: If a host has none of the interfaces, or no address at all.
    """
    distinct = list(dict.fromkeys(tuple(host) for host in hosts))
    counts: dict[str, int] = {}
    for host in distinct:
        for address in {interface.address for interface in host}:
            counts[address] = counts.get(address, 0) + 1
    chosen: dict[tuple[Interface, ...], list[Interface]] = {}
    for host in distinct:
        chosen[host] = [
            interface
            for interface in host
            if counts[interface.address] == 1 and (not names or interface.name in names)
        ]
        if not chosen[host]:
            rank = [tuple(h) for h in hosts].index(host)
            has = ", ".join(f"{i.name} ({i.host})" for i in host) or "none"
            which = f"interface {' or '.join(names)}" if names else "address of its own"
            raise UsageError(
                f"the host of rank {rank} has no {which}; it has: {has}",
                hint="--network-interfaces NAME of our launcher, or "
                f"export {VARIABLE}=NAME",
            )
    networks = [{i.network for i in usable} for usable in chosen.values()]
    common = set.intersection(*networks) if networks else set()
    # Of several, the one that the first host prefers, on every host.
    best = next((i.network for i in chosen[distinct[0]] if i.network in common), "")
    table = {
        host: next((i for i in usable if i.network == best), usable[0]).host
        for host, usable in chosen.items()
    }
    return [table[tuple(host)] for host in hosts]
