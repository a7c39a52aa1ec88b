"""Backends by name: which exist, which can be used here, and which options each takes."""

from __future__ import annotations

import dataclasses
from typing import Any

from collective.backends.base import Availability, Backend
from collective.backends.horovod.backend import BUILD, HorovodBackend
from collective.backends.mpi import MPIBackend
from collective.backends.native import NativeBackend
from collective.backends.options import Options
from collective.backends.single import SingleBackend
from collective.backends.tf_multiworker import MultiWorkerBackend
from collective.backends.tf_parameter_server import ParameterServerBackend
from collective.backends.tf_strategy import (
    CentralStorageBackend,
    MirroredBackend,
    OneDeviceBackend,
    TPUBackend,
)
from collective.environment import Environment, detect
from collective.errors import UsageError
from collective.launch import mpi, processes

BACKENDS: dict[str, type[Backend]] = {
    kind.name: kind
    for kind in (
        SingleBackend,
        OneDeviceBackend,
        MirroredBackend,
        CentralStorageBackend,
        TPUBackend,
        MultiWorkerBackend,
        ParameterServerBackend,
        MPIBackend,
        HorovodBackend,
        NativeBackend,
    )
}


def list_backends(
    environment: Environment | None = None,
) -> dict[str, Availability]:
    """Return every backend and whether it can be used here. Start nothing."""
    environment = environment or detect()
    return {name: kind.availability(environment) for name, kind in BACKENDS.items()}


def ranks(backend: str, replicas: int) -> int:
    """Return how many processes to start for so many replicas."""
    return replicas + BACKENDS[backend].extra_ranks


def can_start(backend: str, replicas: int) -> Availability:
    """Return whether a job of so many replicas of a backend can be started here.

    ``collective.comparison.launching.command_line`` gives the command that starts it.
    """
    kind = BACKENDS[backend]
    launcher = kind.launcher
    if not launcher:
        return kind.availability(Environment())
    if launcher != "collectiverun" and not processes.find_program(launcher):
        hint = BUILD if launcher == "horovodrun" else mpi.HINT_INSTALL
        return Availability(False, f"there is no {launcher}", hint)
    size = ranks(backend, replicas)
    return kind.availability(Environment(launcher, 0, size, 0, size))


def describe_backends() -> dict[str, dict[str, Any]]:
    """Describe every backend, in types that JSON has; start nothing.

    Returns:
        By name: ``summary``; and as dicts of ``Availability``, ``alone``, for this
        process, and ``launched``, for two processes that its launcher starts.
    """
    return {
        name: {
            "summary": kind.summary,
            "alone": dataclasses.asdict(kind.availability(detect())),
            "launched": dataclasses.asdict(can_start(name, 2)),
        }
        for name, kind in BACKENDS.items()
    }


def options_of(name: str) -> set[str]:
    """Return the names of the options that a backend takes."""
    return {o for kind in BACKENDS[name].__mro__ for o in vars(kind).get("takes", ())}


def set_options(options: Options) -> set[str]:
    """Return the names of the options that differ from their defaults."""
    default = Options()
    return {
        name for name, value in vars(options).items() if value != getattr(default, name)
    }


def refuse_foreign_options(name: str, options: Options) -> None:
    """Refuse options that are set and that only other backends take.

    Raises:
        UsageError: Names the option and the backends that take it.
    """
    taken = options_of(name)
    if BACKENDS[name].one_replica:
        devices = options.devices or 1
        if devices > 1:
            raise UsageError(
                f"devices={devices}: backend {name!r} is on one device",
                hint="backend tf-mirrored",
            )
        taken |= {"devices"}
    for option in sorted(set_options(options) - taken):
        owners = [owner for owner in BACKENDS if option in options_of(owner)]
        raise UsageError(
            f"{option} is an option of backend "
            f"{' and '.join(map(repr, owners))}, and this is {name!r}",
            hint=f"backend {' | '.join(owners)}, or leave {option} out",
        )
