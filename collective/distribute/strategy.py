"""``collective.distribute.Strategy``: a ``tf.distribute.Strategy`` over any backend.

TensorFlow's own mirrored variables, distributed data sets and replica contexts are
used. Ours is the work across processes: sums and gathers, the first value of a
variable, the rows of a rank, and the number of replicas. Begin with ``extended``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from collective import backends
from collective.backends.base import Backend
from collective.backends.capabilities import Serving
from collective.backends.devices import configure, local_devices
from collective.backends.tf_multiworker import MultiWorkerBackend
from collective.distribute import tf_internal
from collective.distribute.extended import Extended, look_on_all_replicas
from collective.distribute.fitting import backend_of
from collective.distribute.routing import route
from collective.errors import UsageError


class Strategy(tf.distribute.MirroredStrategy):
    """One replica on each device of each process, over any backend.

    >>> strategy = collective.distribute.Strategy("mpi")
    >>> with strategy.scope():
    ...     model = ...

    Args:
        backend: A name (``python -m collective.backends`` lists them) or a backend. A
            backend made from a strategy of TensorFlow, as ``tf-mirrored``, returns that
            strategy itself; so does ``tf-multiworker`` by its name.
        devices: The devices of this process: their names, or their number; by default
            one, the first GPU if there is any. Ask for more than one before
            TensorFlow's first operation.
        one_host: Whether the program was written for the devices of one host, as with
            ``tf.distribute.MirroredStrategy``: one input pipeline, whose batches all
            replicas share.

    Raises:
        UsageError: The backend cannot run such a program.
    """

    _fit_backend: Backend | None = None

    def __new__(
        cls,
        backend: str | Backend = "auto",
        devices: int | Sequence[str] | None = None,
        *,
        one_host: bool = False,
    ) -> Any:
        """Return the strategy, or TensorFlow's if the backend is made from one."""
        named = backend if isinstance(backend, str) else ""
        if isinstance(backend, str):
            several = devices if isinstance(devices, int) else None
            own = backend.startswith("tf-")
            options = backends.Options(devices=several) if own else None
            backend = backends.get(backend, options)
        found = getattr(backend, "strategy", None)
        if isinstance(backend, MultiWorkerBackend) and named == backend.name:
            found = backend.tf_strategy
        if found is not None:
            return found
        self = super().__new__(cls)
        self.open(backend, devices, one_host)
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: ``__new__`` has made it."""

    def open(
        self, backend: Backend, devices: int | Sequence[str] | None, one_host: bool
    ) -> None:
        """Initialize it with the arguments of the class; called once."""
        _check(backend)
        names = _names(backend, devices)
        _share_seed(backend)
        tf.distribute.Strategy.__init__(self, Extended(self, backend, names, one_host))
        route(backend)
        look_on_all_replicas()

    @property
    def backend(self) -> Backend:
        """Return the backend that sums across processes."""
        return self.extended.backend

    @property
    def fit_backend(self) -> Backend:
        """Return the backend by which ``collective.fit`` trains models of this scope."""
        if self._fit_backend is None:
            self._fit_backend = backend_of(self)
        return self._fit_backend


def _check(backend: Backend) -> None:
    if isinstance(backend, Serving):
        raise UsageError(
            f"backend {backend.name!r} has no replicas in sync: its workers train on "
            "batches of their own",
            hint="backend native or mpi; or collective.fit "
            "(docs/how-to/parameter-servers.md)",
        )
    if backend.elastic or backend.joins:
        raise UsageError(
            "a tf.distribute program cannot run in an elastic job: a rank that joins "
            "would be at another place of the program",
            hint="leave out --min-np; and start the program again after a failure: it "
            "continues from checkpoints of its own",
        )
    if backend.options.tensor_parallel > 1:
        raise UsageError(
            "tensor_parallel cuts weights, which a strategy of replicas does not",
            hint="collective.fit, or leave the option out",
        )


def _names(backend: Backend, devices: int | Sequence[str] | None) -> list[str]:
    """Return the names of this process' devices."""
    if isinstance(devices, int):
        if devices < 1:
            raise UsageError(f"devices={devices}", hint="devices=1 or more")
        if devices > 1:
            configure(backend.options, backend.environment, backend.overlaps, devices)
            return local_devices(devices)
    elif devices:
        return list(devices)
    return ["GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"]


def _share_seed(backend: Backend) -> None:
    """Give all ranks one seed, if the program has set none.

    Shuffles without a seed of their own must have the same order on all ranks, of which
    each reads some rows.
    """
    if backend.size == 1 or tf_internal.tensorflow_seed() is not None:
        return
    drawn = np.random.SeedSequence().generate_state(1).astype(np.int64)
    tf.random.set_seed(int(backend.broadcast_array(drawn)[0]))
