"""Ranks on this host: no MPI, no ssh."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
from collections.abc import Mapping, Sequence

from collective.environment.base import MIN_NP
from collective.hosts import Host, Rank
from collective.launch import cores
from collective.launch.job import Job, Member
from collective.launch.marks import ENDED, Marks
from collective.launch.output import Style, tell


def run(
    ranks: Sequence[Rank],
    options: argparse.Namespace,
    style: Style,
    variables: Mapping[str, str],
) -> int:
    """Starts the ranks and waits for them; returns the exit code of the job."""
    size, least = len(ranks), options.min_np
    ended = Marks(size) if least is not None else None
    # Told as several names of this host or as one, it is one host.
    places = {
        "COLLECTIVE_SIZE": str(size),
        "COLLECTIVE_LOCAL_SIZE": str(size),
        "COLLECTIVE_JOB": os.urandom(16).hex(),
        **({MIN_NP: str(least), ENDED: ended.path} if ended else {}),
        **variables,
    }
    bound = [[]] * size if options.binding_args else cores.share(size)
    members = [
        Member(
            rank,
            options.command,
            {
                **places,
                "COLLECTIVE_RANK": str(rank),
                "COLLECTIVE_LOCAL_RANK": str(rank),
            },
            bound[rank],
            takes_input=rank == 0,
        )
        for rank in range(size)
    ]
    if options.dry_run:
        for member in members:
            assigned = " ".join(
                f"{name}={shlex.quote(value)}"
                for name, value in sorted(member.variables.items())
            )
            print(f"[{member.rank}] {assigned} {shlex.join(member.command)}")
        return 0
    if options.verbose:
        how = (
            "each bound to its own cores"
            if bound[0]
            else "not bound: the kernel places them"
        )
        tell(f"{size} ranks on this host, {how}: {shlex.join(options.command)}")
    return Job(members, size, style, options.verbose, least=least, ended=ended).run()


def is_here(host: Host) -> bool:
    """Whether a host is this machine: by its name, or by an address of ours."""
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
