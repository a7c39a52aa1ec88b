"""Backends by name, and ``auto``."""

from __future__ import annotations

from backends.base import Availability, Backend, Options
from backends.devices import gpus
from backends.horovod import HorovodBackend
from backends.mpi import MPIBackend
from backends.native import NativeBackend
from backends.single import SingleBackend
from backends.tf_mirrored import MirroredBackend
from backends.tf_multiworker import MultiWorkerBackend
from collective.environment import Environment, detect
from collective.errors import UsageError

BACKENDS: dict[str, type[Backend]] = {
    kind.name: kind
    for kind in (
        SingleBackend,
        MirroredBackend,
        MultiWorkerBackend,
        MPIBackend,
        HorovodBackend,
        NativeBackend,
    )
}


def choose(environment: Environment, options: Options) -> tuple[str, str]:
    """What ``auto`` means here.

    Returns:
        The backend's name and, for the summary, why.
    """
    if environment.launched:
        started = f"{environment.launcher} started {environment.size} processes"
        if environment.launcher == "horovodrun":
            horovod = HorovodBackend.availability(environment)
            if horovod.usable:
                return "horovod", started
            started += f"; horovod: {horovod.reason}"
        native = NativeBackend.availability(environment)
        if native.usable:
            return "native", started
        return "mpi", f"{started}; native: {native.reason}"
    if (options.devices or gpus()) > 1:
        return "tf-mirrored", f"{options.devices or gpus()} devices in one process"
    return "single", "one process with one device"


def list_backends(
    environment: Environment | None = None,
) -> dict[str, Availability]:
    """Every backend and whether it can be used here. Starts nothing."""
    environment = environment or detect()
    return {name: kind.availability(environment) for name, kind in BACKENDS.items()}


def get(name: str = "auto", options: Options | None = None) -> Backend:
    """Makes a backend. Call it before the first TensorFlow operation.

    Args:
        name: One of ``BACKENDS``, or ``auto``.
        options: Devices, threads, communication.

    Raises:
        UsageError: Unknown or unusable here, or an option is another backend's;
            says why and what to type.
    """
    options = options or Options()
    environment = detect()
    because = "asked for"
    if name == "auto":
        name, because = choose(environment, options)
    if name not in BACKENDS:
        raise UsageError(
            f"unknown backend {name!r}", hint=f"--backend {' | '.join(BACKENDS)}"
        )
    _refuse_options_of_others(name, options)
    usable = BACKENDS[name].availability(environment)
    if not usable.usable:
        raise UsageError(
            f"backend {name!r} cannot be used here: {usable.reason}", hint=usable.hint
        )
    backend = BACKENDS[name](options, environment)
    backend.chosen_because = because
    return backend


def _refuse_options_of_others(name: str, options: Options) -> None:
    for kind in BACKENDS.values():
        for option in set(kind.own_options) - set(BACKENDS[name].own_options):
            if getattr(options, option) != getattr(Options(), option):
                raise UsageError(
                    f"--{option.replace('_', '-')} is an option of backend "
                    f"{kind.name!r}, and this is {name!r}",
                    hint=f"--backend {kind.name}",
                )
