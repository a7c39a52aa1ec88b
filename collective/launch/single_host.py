"""Ranks on this host: no MPI, no ssh."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence

from collective.elastic import membership_file
from collective.environment.base import MAX_NP, MIN_NP
from collective.environment.collectiverun import JOINS
from collective.hosts import Host, Rank
from collective.launch import cores
from collective.launch.elastic import ElasticJob, Growth
from collective.launch.job import Job, Member
from collective.launch.output import Style, tell


def run(
    ranks: Sequence[Rank],
    options: argparse.Namespace,
    style: Style,
    variables: Mapping[str, str],
    slots: Callable[[], int] | None = None,
    begun: Callable[[ElasticJob], None] | None = None,
) -> int:
    """Starts the ranks and waits for them; returns the exit code of the job.

    Args:
        ranks: Those to start.
        options: The command line.
        style: How output is shown.
        variables: Added to the ranks' environment.
        slots: Tells how many ranks there shall be later; as many as now by default.
        begun: Called with the job, if ranks may come and go in it.
    """
    size, least, most = len(ranks), options.min_np, options.max_np
    for name in (MIN_NP, MAX_NP, JOINS, membership_file.VARIABLE):
        os.environ.pop(name, None)  # of a job within which this one is started
    # Told as several names of this host or as one, it is one host.
    places = {
        "COLLECTIVE_SIZE": str(size),
        "COLLECTIVE_LOCAL_SIZE": str(size),
        "COLLECTIVE_JOB": os.urandom(16).hex(),
        **variables,
    }
    told = None
    if least is not None:
        told = membership_file.Board(size)
        places |= {MIN_NP: str(least), membership_file.VARIABLE: told.path}
    if most is not None:
        places[MAX_NP] = str(most)
    bound = [[]] * (most or size) if options.binding_args else cores.share(most or size)

    def member(rank: int, slot: int, **more: str) -> Member:
        own = {"COLLECTIVE_RANK": str(rank), "COLLECTIVE_LOCAL_RANK": str(slot)}
        return Member(
            rank,
            options.command,
            {**places, **own, **more},
            bound[slot],
            takes_input=rank == 0,
        )

    def later(rank: int, slot: int) -> Member:
        there = most or size
        places = {
            "COLLECTIVE_SIZE": str(max(rank + 1, there)),
            "COLLECTIVE_LOCAL_SIZE": str(there),
        }
        return member(rank, slot, **places, **{JOINS: "1"})

    members = [member(rank, rank) for rank in range(size)]
    if options.dry_run:
        for one in members:
            assigned = " ".join(
                f"{name}={shlex.quote(value)}"
                for name, value in sorted(one.variables.items())
            )
            print(f"[{one.rank}] {assigned} {shlex.join(one.command)}")
        return 0
    if options.verbose:
        how = (
            "each bound to its own cores"
            if bound[0]
            else "not bound: the kernel places them"
        )
        tell(f"{size} ranks on this host, {how}: {shlex.join(options.command)}")
    if told is None:
        return Job(members, size, style, options.verbose).run()
    growth = None if most is None else Growth(slots or (lambda: size), most, later)
    job = ElasticJob(members, size, style, options.verbose, least or 1, told, growth)
    if begun is not None:
        begun(job)
    return job.run()


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
