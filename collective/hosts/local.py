"""Which host is this machine."""

from __future__ import annotations

import socket

from collective.hosts.host import Host


def is_local(host: Host) -> bool:
    """Whether a host is this machine: by its name, or by an address of ours.

    A host with a user name counts as another: a process there runs as somebody else.
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
                probe.bind(address)  # which only works with an address of ours
            return True
        except OSError:
            continue
    return False
