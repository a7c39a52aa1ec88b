"""``collective.predict``, what ``model.predict`` is to Keras."""

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
def predict(
    model: keras.Model,
    x: Any,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    steps: int | None = None,
    callbacks: Callbacks = None,
    *,
    backend: str | Backend = "auto",
) -> Any:
    """Return the outputs of a model for all rows of x, computed by all ranks together.

    Every rank calls it with the same data, and gets all outputs, in the order of the
    data; they are those of rank 0's weights. The arguments up to ``callbacks`` are those
    of ``keras.Model.predict``.

    Args:
        model: A model; it need not be compiled.
        x: Inputs, as for ``collective.fit``.
        batch_size: Rows that are computed at a time, over all replicas; 32 by default.
        verbose: 0 silent, 1 a bar, 2 a line, ``auto``.
        steps: How many batches, at most.
        callbacks: Their ``on_predict_*`` methods are called, on rank 0. With
            ``on_predict_batch_end`` the outputs are exchanged after each batch, which
            takes longer.
        backend: A name or a backend.

    Returns:
        A NumPy array ``[rows, ...]``, a RaggedTensor, or a tree of these.

    Raises:
        UsageError: These are not data, or there are not rows; or an output of the model
            has not one entry for each row.
    """
    backend = open_backend(backend_for(model, backend))
    arguments = {
        "x": x,
        "batch_size": batch_size,
        "verbose": verbose,
        "steps": steps,
    }
    return keras_call.call("predict", model, arguments, callbacks, backend)
