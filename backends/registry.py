"""Backends by name: which exist, which can be used here, and which options each takes."""

from __future__ import annotations

import dataclasses

from collective.backends.base import Availability, Backend, CoreOptions
from collective.backends.horovod.backend import HorovodBackend
from collective.backends.launchers import STARTS, ranks
from collective.backends.mpi import MPIBackend
from collective.backends.native import NativeBackend
from collective.backends.options import Options
from collective.backends.parameter_server.backend import ParameterServerBackend
from collective.backends.single import SingleBackend
from collective.backends.tf_central_storage import CentralStorageBackend
from collective.backends.tf_mirrored import MirroredBackend
from collective.backends.tf_multiworker import MultiWorkerBackend
from collective.backends.tf_one_device import OneDeviceBackend
from collective.backends.tf_tpu import TPUBackend
from collective.environment import Environment, detect
from collective.errors import UsageError
from collective.launch import processes

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
    """Every backend and whether it can be used here. Starts nothing."""
    environment = environment or detect()
    return {name: kind.availability(environment) for name, kind in BACKENDS.items()}


def can_start(backend: str, replicas: int) -> Availability:
    """Whether a job of so many replicas of a backend can be started here.

    ``launch_command.line`` gives the command that starts it.
    """
    kind, launcher = BACKENDS[backend], STARTS[backend].launcher
    if not launcher:
        return kind.availability(Environment())
    if launcher != "collectiverun" and not processes.find_program(launcher):
        made_by = "make horovod" if launcher == "horovodrun" else "make train"
        return Availability(False, f"there is no {launcher}", made_by)
    size = ranks(backend, replicas)
    return kind.availability(Environment(launcher, 0, size, 0, size))


def options_of(name: str) -> set[str]:
    """The names of the options that a backend takes."""
    return {field.name for field in dataclasses.fields(BACKENDS[name].option_type)}


def set_options(options: CoreOptions) -> set[str]:
    """The names of the options that differ from their defaults."""
    default = Options()
    return {
        name for name, value in vars(options).items() if value != getattr(default, name)
    }


def refuse_foreign_options(name: str, options: CoreOptions) -> None:
    """Refuses options that are set and that only other backends take.

    Raises:
        UsageError: Names the option and the backends that take it.
    """
    taken = options_of(name)
    if STARTS[name].one_replica:
        devices = getattr(options, "devices", None) or 1
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
