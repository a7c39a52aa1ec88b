"""Makes a model ready to train on a backend."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.checks import check_model
from collective.training.input.pipeline import Batch
from collective.training.memory import partitioned, sharded_optimizer
from collective.training.parallel import partition, placement


def prepare_model(
    model: keras.Model | Callable[[], keras.Model],
    backend: Backend,
    spec: Batch,
    *,
    rows: int,
    recompute: bool,
    shard_optimizer: bool,
    jit_compile: bool,
) -> keras.Model:
    """Makes the model if a function was given, and builds all of its variables.

    Args:
        model, backend, recompute, shard_optimizer, jit_compile: As for
            ``collective.training.fit``.
        spec: Of the batches, as ``tf.TensorSpec``.
        rows: The most rows of a micro-batch on one replica.

    Raises:
        UsageError: The model does not fit the data, the backend or the options.
    """
    if backend.stages:
        placement.check(
            backend,
            recompute=recompute,
            shard_optimizer=shard_optimizer,
            jit_compile=jit_compile,
        )
    if not isinstance(model, keras.Model):
        with backend.scope():
            model = model()
    check_model(model, backend)
    if shard_optimizer:
        sharded_optimizer.check(model, backend)
    if backend.tensor is not None:
        partition.check(backend, model, jit_compile)
    whole = not shard_optimizer and backend.tensor is None
    with_optimizer = whole and not backend.stages
    with backend.scope():
        try:
            keras_compat.build(model, spec[:3], optimizer=with_optimizer)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            shape = tf.nest.map_structure(lambda s: tuple(s.shape[1:]), spec.x)
            first = str(error).strip().split("\n")[0]
            raise UsageError(
                f"model {model.name!r} does not fit the data (a row of x has shape "
                f"{shape}): {first}",
                hint="give the model the input shape and the number of outputs of the "
                "data, or choose another --data",
            ) from error
    if not whole and partitioned.of(model) is None:
        (sharded_optimizer.Sharding if shard_optimizer else partition.TensorParts)(
            model, backend
        )
    if backend.stages and placement.of(model) is None:
        placement.Placement(model, backend.stages, rows)
    return model
