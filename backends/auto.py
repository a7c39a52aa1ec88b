"""``--backend auto``: the backend by launcher and devices, at once, nothing measured.

It measures nothing. To find the fastest backend for a model here, compare them
(``compare.py``) and name it.
"""

from __future__ import annotations

from dataclasses import dataclass

from collective import session
from collective.backends.base import Backend
from collective.backends.devices import gpus, tensorflow_has_started
from collective.backends.horovod import installed
from collective.backends.horovod.backend import HorovodBackend
from collective.backends.mpi import MPIBackend
from collective.backends.native import NativeBackend
from collective.backends.options import Options
from collective.backends.registry import options_of, set_options
from collective.backends.tf_multiworker import MultiWorkerBackend
from collective.backends.world import CoreWorld, can_serve
from collective.environment import Environment
from collective.environment.gpus import are_shared


@dataclass(frozen=True)
class Choice:
    """The backend that ``auto`` takes here, and why."""

    name: str
    because: str


def choose(environment: Environment, options: Options) -> Choice:
    """Choose a backend, the same on every rank of a host. Every rank calls this.

    Installed files, launcher and GPUs are equal on all ranks of a host. Only whether
    TensorFlow has started may differ: a script may have used it on rank 0 alone. That
    matters with GPUs only, and only then do the ranks ask each other.

    Raises:
        CollectiveError: A rank did not join.
    """
    choice = by_rule(environment.current, options, started=False)
    if choice.name == MultiWorkerBackend.name and _has_started_somewhere(environment):
        choice = by_rule(environment.current, options, started=True)
    return choice


def _has_started_somewhere(environment: Environment) -> bool:
    """Return whether TensorFlow has started: on any rank of one host, else on this."""
    started = tensorflow_has_started()
    if not can_serve(environment):
        return started
    joined = session.is_initialized()
    started = any(CoreWorld(environment).allgather(started))
    if not joined:
        session.shutdown()
    return started


def by_rule(environment: Environment, options: Options, started: bool) -> Choice:
    """Return the choice, given whether TensorFlow has started on some rank."""
    if environment.launched:
        by = f"{environment.launcher} started {environment.size} processes"
        if environment.launcher == "horovodrun":
            horovod = HorovodBackend.availability(environment)
            if horovod.usable:
                return Choice("horovod", by)
            by += f"; horovod: {horovod.reason}"
        if on_gpus := _on_gpus(environment, options, started):
            return Choice(on_gpus, f"{by}, each with a GPU: NCCL sums on them")
        native = NativeBackend.availability(environment)
        if native.usable:
            return Choice("native", by)
        because = f"{by}; native: {native.reason}"
        mpi = MPIBackend.availability(environment)
        if not mpi.usable and MultiWorkerBackend.availability(environment).usable:
            return Choice("tf-multiworker", f"{because}; mpi: {mpi.reason}")
        return Choice("mpi", because)
    devices = options.devices or gpus()
    if devices > 1:
        return Choice("tf-mirrored", f"{devices} devices in one process")
    return Choice("single", "one process with one device")


def _on_gpus(environment: Environment, options: Options, started: bool) -> str | None:
    """Return the backend that sums on GPUs if each rank has one, or None.

    All other backends with several processes copy gradients to the host and back.
    """
    if not gpus() or are_shared(environment):
        return None  # NCCL refuses two ranks on one GPU

    def fits(kind: type[Backend]) -> bool:
        takes_all = set_options(options) <= options_of(kind.name)
        return takes_all and kind.availability(environment).usable

    # The first must be made before TensorFlow starts.
    if not started and fits(MultiWorkerBackend):
        return MultiWorkerBackend.name
    if fits(HorovodBackend) and installed.has_nccl():
        return HorovodBackend.name
    return None
