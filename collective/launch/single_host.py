"""Ranks on this host, as children of this process: no MPI, no ssh."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping

from collective.elastic import membership_file
from collective.elastic.membership_file import MembershipFile
from collective.environment import Environment
from collective.environment.base import JOINS, MAX_NP, MIN_NP
from collective.launch import cores, horovod_settings
from collective.launch.elastic import ElasticSupervisor
from collective.launch.options import LaunchOptions
from collective.launch.output import print_message
from collective.launch.supervisor import ProcessSpec, Supervisor


def job(
    options: LaunchOptions,
    size: int,
    variables: Mapping[str, str] | None = None,
    slots: Callable[[], int] | None = None,
) -> Supervisor:
    """The job, ready to be run; an elastic one with ``--min-np``.

    Args:
        variables: Added to the environment of the ranks, beside those of the options.
        slots: Returns how many ranks there should be later; by default ``size``.
    """
    for name in (MIN_NP, MAX_NP, JOINS, membership_file.VARIABLE):
        os.environ.pop(name, None)  # of a job within which this one is started
    common = {
        **options.rank_variables,
        **(variables or {}),
        # The host may be listed under several names: it is one host for the ranks.
        "COLLECTIVE_JOB": os.urandom(16).hex(),
    }
    # Shared out for as many ranks as there may ever be.
    most = options.max_np or size
    shares = [[]] * most if options.binding_args else cores.share(most)

    def spec(rank: int, slot: int, joins: bool = False) -> ProcessSpec:
        local_size = most if joins else size
        total = max(rank + 1, local_size)
        place = Environment("collectiverun", rank, total, slot, local_size, 0, 1)
        own = {
            **horovod_settings.place(place),
            "COLLECTIVE_SIZE": str(total),
            "COLLECTIVE_LOCAL_SIZE": str(local_size),
            "COLLECTIVE_RANK": str(rank),
            "COLLECTIVE_LOCAL_RANK": str(slot),
            **({JOINS: "1"} if joins else {}),
        }
        return ProcessSpec(
            rank, options.command, {**common, **own}, shares[slot], rank == 0
        )

    if options.verbose:
        bound = "each bound to its own cores"
        how = bound if shares[0] else "not bound: the kernel places them"
        print_message(
            f"{size} ranks on this host, {how}: {shlex.join(options.command)}"
        )
    specs = [spec(rank, rank) for rank in range(size)]
    membership = MembershipFile(size)
    if options.min_np is None:
        return Supervisor(
            specs,
            size,
            options.style,
            verbose=options.verbose,
            membership=membership,
            end_seconds=options.end_seconds,
        )
    wanted = None
    if options.max_np is not None:
        wanted = slots or (lambda: size)
    return ElasticSupervisor(specs, options, membership, spec, wanted)
