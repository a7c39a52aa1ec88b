"""``collective.evaluate``, what ``model.evaluate`` is to Keras."""

from __future__ import annotations

from typing import Any

import keras

from collective.backends.base import Backend
from collective.training.calls import keras_call
from collective.training.calls.opening import open_backend
from collective.training.calls.scoped_models import backend_for
from collective.training.loop.callbacks import Callbacks
from collective.training.process.known_arguments import known_arguments


@known_arguments
def evaluate(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Callbacks = None,
    return_dict: bool = False,
    *,
    backend: str | Backend = "auto",
) -> Any:
    """Return loss and metrics of a model on data, shared by all replicas, exact.

    Every rank calls it with the same data, and gets the same numbers; they are those of
    rank 0's weights. The arguments up to ``return_dict`` are those of
    ``keras.Model.evaluate``.

    Args:
        model: A compiled model.
        x, y, sample_weight: Data, as for ``collective.fit``.
        batch_size: Rows that are evaluated at a time, over all replicas; 32 by default.
        verbose: 0 silent, 1 a bar, 2 a line, ``auto``.
        steps: How many batches, at most.
        callbacks: Their ``on_test_*`` methods are called, on rank 0.
        return_dict: Whether to return a dict.
        backend: A name or a backend.

    Returns:
        The loss, or a list of loss and metrics in the order of
        ``model.metrics_names``; with ``return_dict``, numbers by name.

    Raises:
        UsageError: The model does not fit the data, or these are not data.
    """
    backend = open_backend(backend_for(model, backend))
    arguments = {
        "x": x,
        "y": y,
        "batch_size": batch_size,
        "verbose": verbose,
        "sample_weight": sample_weight,
        "steps": steps,
        "return_dict": return_dict,
    }
    return keras_call.call("evaluate", model, arguments, callbacks, backend)
