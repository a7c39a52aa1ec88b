"""Network interfaces of this host, and the addresses at which hosts reach each other."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from collective.errors import UsageError

VARIABLE = "COLLECTIVE_INTERFACES"


@dataclass(frozen=True)
class Interface:
    """An address of this host."""

    name: str  # the system's name of the interface
    address: str  # IPv4, with the length of its network's prefix: 10.0.0.2/24

    @property
    def host(self) -> str:
        """Return the address alone."""
        return self.address.partition("/")[0]

    @property
    def network(self) -> str:
        """Return the network, ``10.0.0.0/24``."""
        return str(ipaddress.ip_interface(self.address).network)


def interfaces() -> list[Interface]:
    """Return the IPv4 addresses of this host without loopback, the default route's first."""
    found = []
    status = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if name not in status or not status[name].isup:
            continue
        if "loopback" in status[name].flags.split(","):
            continue
        for each in addresses:
            if each.family == socket.AF_INET:
                own = ipaddress.ip_interface(f"{each.address}/{each.netmask or 32}")
                found.append(Interface(name, own.with_prefixlen))
    default = _default_address()
    return sorted(found, key=lambda interface: interface.host != default)


def _default_address() -> str:
    """Return the address that packets to other networks have; send nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation: RFC 5737
            return probe.getsockname()[0]
        except OSError:
            return ""


def others(address: str) -> list[str]:
    """Return this host's interfaces that are not in the network of an address."""
    found = ipaddress.ip_address(address)
    return [
        each.name
        for each in interfaces()
        if found not in ipaddress.ip_interface(each.address).network
    ]


def wanted(variables: Mapping[str, str] | None = None) -> list[str]:
    """Return the interfaces that the user named, by ``--network-interfaces``."""
    env = os.environ if variables is None else variables
    return [name for name in env.get(VARIABLE, "").split(",") if name]


def addresses(hosts: Sequence[Sequence[Interface]], names: Sequence[str]) -> list[str]:
    """Return for each rank the address at which the ranks of other hosts reach it.

    The address lies in a network that every host is in. An address that several hosts have,
    such as the address of a container bridge, is not used, because it leads nowhere. If no
    network is common to all hosts, there are routers between them, and each host's first
    address is used.

    Args:
        hosts: The interfaces of each rank's host, the best first.
        names: Interfaces that the user named; empty for all.

    Raises:
        UsageError: If a host has none of the interfaces, or no address at all.
    """
    host_of = [tuple(host) for host in hosts]
    distinct = list(dict.fromkeys(host_of))
    counts = Counter(a for host in distinct for a in {i.address for i in host})
    chosen = {
        host: [
            interface
            for interface in host
            if counts[interface.address] == 1 and (not names or interface.name in names)
        ]
        for host in distinct
    }
    for host, usable in chosen.items():
        if not usable:
            rank = host_of.index(host)
            has = ", ".join(f"{i.name} ({i.host})" for i in host) or "none"
            which = f"interface {' or '.join(names)}" if names else "address of its own"
            raise UsageError(
                f"the host of rank {rank} has no {which}; it has: {has}",
                hint="--network-interfaces NAME of our launcher, or "
                f"export {VARIABLE}=NAME",
            )
    networks = [{i.network for i in usable} for usable in chosen.values()]
    common = set.intersection(*networks) if networks else set()
    # If there are several, every host takes the one that the first host prefers.
    best = next((i.network for i in chosen[distinct[0]] if i.network in common), "")
    table = {
        host: next((i for i in usable if i.network == best), usable[0]).host
        for host, usable in chosen.items()
    }
    return [table[host] for host in host_of]
