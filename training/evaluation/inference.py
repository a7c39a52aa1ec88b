"""What ``collective.evaluate``, ``collective.predict`` and validation share."""

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
from collective.training.arguments.data import Data, default_batch_size
from collective.training.callbacks import Callbacks, Hooks
from collective.training.exchange import gather_few
from collective.training.input.batches import Batches
from collective.training.input.pipeline import Input
from collective.training.input.source import Source
from collective.training.prepared import get_partition
from collective.training.reporting.progress import verbosity


def open_backend(
    backend: str | Backend,
    gradients: Sequence[int] | None = None,
    threads: int | None = None,
) -> Backend:
    """The backend of a name; a process that only serves does not return.

    Args:
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


def open_inputs(
    data: Data, backend: Backend, batch_size: int | None, steps: int | None
) -> Input | Batches:
    """Data to read in their order.

    Args:
        data: Rows, or batches of them.
        batch_size: Rows of a batch, over all replicas; None as in Keras. Of no effect
            on batches.
        steps: Batches of a pass; None for all.
    """
    if isinstance(data, Source):
        rows = batch_size or default_batch_size(data, steps)
        return Input(data, rows, shuffle=False)
    return Batches(data, backend, steps)


def open_hooks(
    callbacks: Callbacks,
    model: keras.Model,
    backend: Backend,
    verbose: str | int,
    batches: int | None,
) -> Hooks:
    """The hooks of callbacks in one pass over so many batches. Every rank calls it."""
    params = {"verbose": verbose, "epochs": 1, "steps": batches}
    hooks = Hooks(callbacks, model, backend, params)
    hooks.agree()
    return hooks


def use_weights_of_rank_zero(model: keras.Model, backend: Backend) -> None:
    """Gives every rank rank 0's weights, if they differ. Every rank calls it.

    Without it, ranks that made their models with other random numbers would each
    compute a part of a different result.
    """
    if backend.size == 1 or get_partition(model) is not None:
        return
    mark = 0
    for variable in model.variables:
        mark = zlib.crc32(np.asarray(variable).tobytes(), mark)
    marks = gather_few(backend, [mark])
    if (marks != marks[0]).any():
        backend.broadcast(model.variables)


def show(logs: Mapping[str, Any], hooks: Hooks) -> None:
    """Prints Keras' bar or line of a finished pass, on rank 0."""
    verbose, batches = verbosity(hooks.params["verbose"]), hooks.params["steps"]
    if hooks.has_bar or not verbose or hooks.backend.rank:
        return
    bar = keras.utils.Progbar(batches, verbose=verbose, stateful_metrics=set(logs))
    bar.update(batches or 1, list(logs.items()), finalize=True)
