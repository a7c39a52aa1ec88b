"""An address and a free port of each rank, for TensorFlow's own servers."""

from __future__ import annotations

import socket
from typing import Any

from collective.backends import core_world, mpi_world
from collective.backends.base import Availability
from collective.environment import Environment
from collective.net import interfaces


def availability(environment: Environment) -> Availability:
    """Whether MPI, or on one host our core, can exchange addresses."""
    by_mpi = mpi_world.availability(environment)
    if not by_mpi.usable and core_world.can_serve(environment):
        launched = f"{environment.size} processes by {environment.launcher}"
        return Availability(True, f"{launched}, on one host")
    return by_mpi


def world(environment: Environment) -> Any:
    """The communicator that exchanges them, with mpi4py's names."""
    if mpi_world.availability(environment).usable:
        return mpi_world.start(environment)
    return core_world.CoreWorld(environment)


def leave(environment: Environment) -> None:
    """Ends MPI, or the core, on all ranks; each calls it.

    MPI lets no rank end before all ranks do, but servers end when the chief has ended.
    """
    if mpi_world.availability(environment).usable:
        from mpi4py import MPI

        MPI.Finalize()
    else:
        import collective

        collective.shutdown()


def exchange(environment: Environment, world: Any) -> list[str]:
    """``host:port`` of each rank, in their order. Every rank calls it.

    The ports were free a moment ago.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
        # One host: loopback, whatever interfaces it has.
        alone = environment.size == environment.local_size
        mine = [] if alone else interfaces.interfaces()
        ranks = world.allgather((mine, port))
    hosts = ["127.0.0.1"] * environment.size
    if any(found for found, _ in ranks):
        names = interfaces.wanted()
        hosts = interfaces.addresses([found for found, _ in ranks], names)
    return [f"{host}:{port}" for host, (_, port) in zip(hosts, ranks, strict=True)]
