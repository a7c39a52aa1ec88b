"""``collective.evaluate``, and what it shares with ``predict`` and ``fit``."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from collective.backends.base import Backend
from collective.distribute.scoped_models import as_one_process, backend_for
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.calls import by_keras, keras_call
from collective.training.calls.evaluation import make_evaluation
from collective.training.calls.opening import open_backend, open_inputs
from collective.training.input.batches import Batches
from collective.training.input.data import as_data
from collective.training.input.replica_batches import first_of, stacked
from collective.training.input.source import Source
from collective.training.loop.callbacks import CallbackMethods, Callbacks
from collective.training.loop.progress import verbosity
from collective.training.model.prepared import get_partition
from collective.training.parallel.tensor_parallel_variables import shards_of
from collective.training.preparation.prepare import build_to_evaluate, runs_eagerly
from collective.training.process import interrupts
from collective.training.process.failure import guarded
from collective.training.process.known_arguments import known_arguments
from collective.training.process.object_collectives import gather_few
from collective.training.steps.own_batches import trained_with
from collective.training.verification import compare_settings


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
    if by_keras.serves(model, x, backend):
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
    with guarded(backend), as_one_process(model):
        compare_settings(backend)
        data = as_data(x, y, sample_weight)
        stacks = trained_with(model) == "batch" and not isinstance(data, Source)
        if stacks and backend.most_replicas > 1:
            data = stacked(data, backend.most_replicas)
        inputs = open_inputs(data, backend, batch_size, steps)
        if isinstance(inputs, Batches):
            inputs.begin_as_keras()
        if not isinstance(model, keras.Model) or not model.compiled:
            raise UsageError(
                "evaluate needs a compiled keras.Model",
                hint="model.compile(optimizer=..., loss=...) before collective.evaluate",
            )
        of_stacks = isinstance(inputs, Batches) and inputs.is_stacked
        spec = first_of(inputs.spec) if of_stacks else inputs.spec
        prepared = build_to_evaluate(model, backend, spec)
        use_weights_of_rank_zero(model, backend)
        evaluation = make_evaluation(prepared, backend, inputs, steps)
        methods = agreed_methods(callbacks, model, backend, verbose, evaluation.batches)
        with shown(methods) as logs:
            with runs_eagerly(model), interrupts.between_steps():
                logs |= sorted(evaluation(methods).items())
            methods.share_state()
        return logs if return_dict else keras_compat.data.in_metric_order(model, logs)


def agreed_methods(
    callbacks: Callbacks,
    model: keras.Model,
    backend: Backend,
    verbose: str | int,
    batches: int | None,
) -> CallbackMethods:
    """Return the methods of callbacks in one pass. Every rank calls it."""
    params = {"verbose": verbose, "epochs": 1, "steps": batches}
    methods = CallbackMethods(callbacks, model, backend, params)
    methods.agree()
    return methods


def use_weights_of_rank_zero(model: keras.Model, backend: Backend) -> None:
    """Give every rank rank 0's weights, if they differ. Every rank calls it.

    Without it, ranks that made their models with other random numbers would each
    compute a part of a different result.
    """
    if backend.size == 1 or get_partition(model) is not None:
        return
    mark, shards = 0, shards_of(model)
    variables = [v for v in model.variables if id(v) not in shards]
    for variable in variables:
        mark = zlib.crc32(np.asarray(variable).tobytes(), mark)
    marks = gather_few(backend, [mark])
    if (marks != marks[0]).any():
        backend.broadcast(variables)


@contextlib.contextmanager
def shown(methods: CallbackMethods) -> Iterator[dict[str, Any]]:
    """Print Keras' bar or line at the end of a pass, on rank 0.

    Yields:
        For the numbers to show. The time of a step is the mean over all, with the first.
    """
    logs: dict[str, Any] = {}
    verbose = verbosity(methods.params["verbose"])
    bar = keras.utils.Progbar(None, verbose=verbose)  # its time begins
    yield logs
    if verbose and not methods.has_bar and not methods.backend.rank:
        bar.target, bar.stateful_metrics = methods.batches, set(logs)
        bar.update(methods.batches, list(logs.items()), finalize=True)
