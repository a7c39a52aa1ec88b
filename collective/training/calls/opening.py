"""Opens the backend that a name stands for, and data that are read in their order."""

from __future__ import annotations

import dataclasses

from collective import backends
from collective.backends.base import Backend
from collective.backends.capabilities import Serving
from collective.backends.devices import tensorflow_has_started
from collective.training.input.data import default_batch_size
from collective.training.input.pipeline import Input
from collective.training.input.source import Source
from collective.training.verification.deterministic import THREADS


def open_backend(backend: str | Backend, threads: int | None = None) -> Backend:
    """Return the backend of a name; a process that only serves does not return.

    Args:
        threads: Threads of a backend that is made here, if TensorFlow has not started.
    """
    if isinstance(backend, str):
        options = backends.Options() if threads is None else with_threads(None, threads)
        backend = _as_before(backends.get(backend, options))
    if isinstance(backend, Serving):
        backend.serve()
    return backend


def with_threads(
    options: backends.Options | None, threads: int = THREADS
) -> backends.Options:
    """Return options of a backend with a number of threads, unless they have one.

    TensorFlow keeps the threads that it has, once it has started.
    """
    options = options or backends.Options()
    if options.threads is not None or tensorflow_has_started():
        return options
    return dataclasses.replace(options, threads=threads)


# Backends that were opened by a name, so that a later call finds the graphs traced for one.
_opened: list[Backend] = []


def _as_before(backend: Backend) -> Backend:
    """Return an earlier backend like this one; else keep this one for later calls."""
    if backend.elastic or isinstance(backend, Serving):
        return backend
    for earlier in _opened:
        if (
            type(earlier) is type(backend)
            and earlier.options == backend.options
            and earlier.environment == backend.environment
        ):
            earlier.chosen_because = backend.chosen_because
            return earlier
    _opened.append(backend)
    return backend


def open_inputs(
    source: Source, backend: Backend, batch_size: int | None, steps: int | None
) -> Input:
    """Return rows that are read in their order.

    Args:
        batch_size: Rows of a batch, over all replicas; None as in Keras.
    """
    return Input(source, batch_size or default_batch_size(source, steps), shuffle=False)
