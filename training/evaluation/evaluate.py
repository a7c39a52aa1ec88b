"""``collective.evaluate``, what ``model.evaluate`` is to Keras."""

from __future__ import annotations

from typing import Any

import keras

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.arguments.data import as_data
from collective.training.callbacks import Callbacks
from collective.training.custom_step.evaluation import make_evaluation
from collective.training.evaluation.inference import (
    open_backend,
    open_hooks,
    open_inputs,
    show,
    use_weights_of_rank_zero,
)
from collective.training.failure import guarded
from collective.training.prepared import build_to_evaluate, runs_eagerly


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
    """Loss and metrics of a model on data, shared by all replicas, exact.

    Every rank calls it with the same data, and gets the same numbers; they are those of
    rank 0's weights. The arguments up to ``return_dict`` are those of
    ``keras.Model.evaluate``.

    Args:
        model: A compiled model.
        x, y, sample_weight: Data, as for ``collective.fit``.
        batch_size: Rows that are evaluated at a time, over all replicas; 32 by default.
        verbose: 0 silent, 1 a bar, 2 a line, ``auto``.
        steps: How many batches, at most.
        callbacks: Their ``on_test_*`` hooks are called, on rank 0.
        return_dict: Whether to return a dict.
        backend: A name or a backend.

    Returns:
        The loss, or a list of loss and metrics in the order of
        ``model.metrics_names``; with ``return_dict``, numbers by name.

    Raises:
        UsageError: The model does not fit the data, or these are no data.
    """
    backend = open_backend(backend)
    with guarded(backend):
        data = as_data(x, y, sample_weight)
        inputs = open_inputs(data, backend, batch_size, steps)
        if not isinstance(model, keras.Model) or not model.compiled:
            raise UsageError(
                "evaluate needs a compiled keras.Model",
                hint="model.compile(optimizer=..., loss=...) before collective.evaluate",
            )
        prepared = build_to_evaluate(model, backend, inputs.spec)
        use_weights_of_rank_zero(model, backend)
        evaluation = make_evaluation(prepared, backend, inputs, steps)
        hooks = open_hooks(callbacks, model, backend, verbose, evaluation.batches)
        with runs_eagerly(model):
            logs = dict(sorted(evaluation(hooks).items()))
        show(logs, hooks)
        return logs if return_dict else keras_compat.in_metric_order(model, logs)
