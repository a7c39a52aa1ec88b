"""What ``collective.evaluate`` and ``collective.predict`` share."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from collective import backends
from collective.backends.base import Backend
from collective.backends.capabilities import Serving
from collective.backends.devices import tensorflow_has_started
from collective.training.exchange import gather_few
from collective.training.prepared import get_partition
from collective.training.reporting.progress import verbosity


def open_backend(
    backend: str | Backend,
    gradients: Sequence[int] | None = None,
    threads: int | None = None,
) -> Backend:
    """The backend of a name; a process that only serves does not return.

    Args:
        backend: A name or a backend.
        gradients: Bytes of each gradient, for ``auto`` to choose by.
        threads: Of a backend made here, if TensorFlow has not started.
    """
    if isinstance(backend, str):
        if tensorflow_has_started():
            threads = None  # it keeps those that it has
        options = backends.Options(threads=threads)
        backend = backends.get(backend, options, gradients)
    if isinstance(backend, Serving):
        backend.serve()
    return backend


def use_weights_of_rank_zero(model: keras.Model, backend: Backend) -> None:
    """Gives every rank rank 0's weights, if they differ. Every rank calls it.

    Without it, ranks that made their models with other random numbers would each
    compute a part of a different result.
    """
    if backend.size == 1 or get_partition(model) is not None:
        return
    sums = gather_few(backend, [_checksum(model)])
    if (sums != sums[0]).any():
        backend.broadcast(model.variables)


def _checksum(model: keras.Model) -> float:
    mark = 0
    for variable in model.variables:
        mark = zlib.crc32(np.asarray(variable).tobytes(), mark)
    return float(mark)


def show(
    logs: Mapping[str, Any], verbose: str | int, batches: int | None, backend: Backend
) -> None:
    """Prints Keras' bar or line of a finished pass, on rank 0."""
    verbose = verbosity(verbose)
    if not verbose or backend.rank:
        return
    bar = keras.utils.Progbar(batches, verbose=verbose, stateful_metrics=set(logs))
    bar.update(batches or 1, list(logs.items()), finalize=True)
