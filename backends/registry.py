"""Backends by name."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence

from collective import recorder, session
from collective.backends.base import Availability, Backend, Options
from collective.backends.horovod.backend import HorovodBackend
from collective.backends.mpi import MPIBackend
from collective.backends.native import NativeBackend
from collective.backends.parameter_server.backend import ParameterServerBackend
from collective.backends.single import SingleBackend
from collective.backends.tf_central_storage import CentralStorageBackend
from collective.backends.tf_mirrored import MirroredBackend
from collective.backends.tf_multiworker import MultiWorkerBackend
from collective.backends.tf_one_device import OneDeviceBackend
from collective.backends.tf_tpu import TPUBackend
from collective.environment import Environment, detect
from collective.environment.base import MAX_NP, MIN_NP
from collective.errors import CollectiveError, UsageError

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


def get(
    name: str = "auto",
    options: Options | None = None,
    gradients: Sequence[int] | Callable[[], Sequence[int]] | None = None,
) -> Backend:
    """Makes a backend. Call it before the first TensorFlow operation.

    Args:
        name: One of ``BACKENDS``, or ``auto``.
        options: Devices, threads, communication.
        gradients: For ``auto``: bytes of each tensor that a step will sum, or a
            function that tells (called in a fork, before TensorFlow has started).

    Raises:
        UsageError: Unknown or unusable here, or an option is another backend's;
            says why and what to type.
    """
    options = options or Options()
    least, most = os.environ.get(MIN_NP), os.environ.get(MAX_NP)  # collectiverun's
    if least and options.min_np is None:
        options = dataclasses.replace(options, min_np=int(least))
    if most and options.max_np is None:
        options = dataclasses.replace(options, max_np=int(most))
    environment = detect()
    if options.min_np is not None and session.is_initialized():
        environment = session.launch_info()  # ranks may have come and gone since the start
    because, predicted = "asked for", {}
    if name == "auto":
        from collective.backends.auto import choose

        choice = choose.choose(environment, options, gradients)
        name, because, predicted = choice.name, choice.because, choice.predicted
    if name not in BACKENDS:
        raise UsageError(
            f"unknown backend {name!r}", hint=f"--backend {' | '.join(BACKENDS)}"
        )
    _refuse_options_of_others(name, options)
    if (options.min_np or 1) > environment.size:
        raise UsageError(
            f"--min-np {options.min_np}, and the number of ranks is {environment.size}",
            hint=f"--min-np {environment.size} or less",
        )
    usable = BACKENDS[name].availability(environment.current)
    if not usable.usable:
        raise UsageError(
            f"backend {name!r} cannot be used here: {usable.reason}", hint=usable.hint
        )
    backend = BACKENDS[name](options, environment)
    backend.chosen_because, backend.predicted = because, predicted
    # Where ranks are not synchronous, they do not wait for each other; where they have
    # met by the core, that has begun it.
    if backend.synchronous and not session.is_initialized():
        with contextlib.suppress(CollectiveError):  # a job without a name
            recorder.start(environment, session.job_name(environment))
    return backend


def _refuse_options_of_others(name: str, options: Options) -> None:
    if BACKENDS[name].one_replica and (options.devices or 1) > 1:
        raise UsageError(
            f"--devices {options.devices}: backend {name!r} is on one device",
            hint="--backend tf-mirrored",
        )
    own = BACKENDS[name].own_options
    if BACKENDS[name].one_replica:
        own += ("devices",)  # one
    for option, given in vars(options).items():
        owners = [n for n, kind in BACKENDS.items() if option in kind.own_options]
        if owners and option not in own and given != getattr(Options(), option):
            raise UsageError(
                f"--{option.replace('_', '-')} is an option of backend "
                f"{' and '.join(map(repr, owners))}, and this is {name!r}",
                hint=f"--backend {' | '.join(owners)}",
            )
