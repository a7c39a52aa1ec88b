"""What is refused before the first step, on every rank alike."""

from __future__ import annotations

import keras
import numpy as np

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.input.source import Source


def check_batch(backend: Backend, global_batch_size: int, accumulate: int) -> None:
    """Refuses a global batch that cannot give each replica a row.

    Raises:
        UsageError: It is too small, or ``accumulate`` is below 1.
    """
    replicas = backend.most_replicas
    if global_batch_size < replicas:
        raise UsageError(
            f"a global batch of {global_batch_size} rows cannot be shared by "
            f"{replicas} replicas",
            hint=f"--global-batch-size {replicas} or more, or fewer replicas",
        )
    if accumulate < 1:
        raise UsageError("accumulate must be at least 1", hint="--accumulate 1")


def check_model(model: keras.Model, backend: Backend) -> None:
    """Refuses a model that the shared step cannot train as the user means it.

    Raises:
        UsageError: Not compiled; made outside the backend's scope; or with Keras'
            accumulation switched on.
    """
    if not isinstance(model, keras.Model):
        raise UsageError(
            f"a keras.Model was expected, not {type(model).__name__}",
            hint="collective.training.fit(model, data), the model compiled",
        )
    if not model.compiled or model.optimizer is None:
        raise UsageError(
            f"model {model.name!r} is not compiled",
            hint="model.compile(optimizer=..., loss=...) before collective.training.fit",
        )
    if keras_compat.core_optimizer(model.optimizer).gradient_accumulation_steps:
        raise UsageError(
            "the optimizer accumulates gradients itself, after they have been summed",
            hint="drop gradient_accumulation_steps and use accumulate=K (--accumulate K)",
        )
    if not backend.synchronous and keras_compat.expects_overflow(model.optimizer):
        raise UsageError(
            "a LossScaleOptimizer counts steps in their order, and backend "
            f"{backend.name!r} has none",
            hint="--precision float32 or mixed_bfloat16",
        )
    synchronized = [
        layer.name
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized
    ]
    if synchronized and backend.replicas > 1:
        raise UsageError(
            f"layer {synchronized[0]!r} synchronises its statistics inside the forward "
            "pass, which the shared step cannot do",
            hint="synchronized=False: its moving statistics are averaged over replicas",
        )
    strategy = getattr(backend, "strategy", None)
    if strategy is not None and model.distribute_strategy is not strategy:
        raise UsageError(
            f"model {model.name!r} was made outside the scope of backend "
            f"{backend.name!r}",
            hint="make and compile it in 'with backend.scope():', or give collective.training.fit "
            "a function that makes it",
        )


def check_labels(model: keras.Model, source: Source) -> None:
    """Refuses labels that sparse categorical cross-entropy cannot use.

    Raises:
        UsageError: A label is negative or not less than the number of outputs.
    """
    bounds = source.label_range()
    loss = model.loss
    sparse = (
        isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
        or loss == "sparse_categorical_crossentropy"
    )
    shape = getattr(model, "output_shape", None)
    if not sparse or bounds is None or not isinstance(shape, tuple):
        return
    classes, (low, high) = shape[-1], bounds
    if low < 0 or high >= classes:
        raise UsageError(
            f"labels go from {low} to {high}, but model {model.name!r} has {classes} "
            f"outputs, for labels from 0 to {classes - 1}",
            hint="number the labels from 0, or give the model more outputs",
        )


def check_same_data(backend: Backend, source: Source) -> None:
    """Refuses data that are longer or shorter, or a stream that begins differently.

    Raises:
        UsageError: On the ranks that differ from rank 0.
    """
    if backend.size == 1:
        return
    begins = 0 if source.random_access else source.fingerprint()
    mine = np.array([len(source), begins], np.int64)
    rows, beginning = map(int, backend.broadcast_array(mine))
    if len(source) != rows:
        raise UsageError(
            f"the data have {len(source)} rows here, and {rows} on rank 0; ranks would "
            "train on rows of their own",
            hint="give every rank all of the data: each takes its share of every batch",
            everywhere=False,
        )
    if begins != beginning:
        # The mark of a shuffle without a seed.
        raise UsageError(
            f"rank {backend.rank}: the data set begins with another row than on rank "
            "0; ranks would train on rows of their own",
            hint="give its shuffle a seed: dataset.shuffle(n, seed=1, "
            "reshuffle_each_iteration=False)",
            everywhere=False,
        )
