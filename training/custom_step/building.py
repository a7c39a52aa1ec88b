"""Every variable of a model with its own step: made by tracing the step once."""

from __future__ import annotations

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.custom_step.data import packed
from collective.training.custom_step.refusals import DROP_IN
from collective.training.input.pipeline import Batch
from collective.training.replica.rows import Rows, without_none


def build(model: keras.Model, backend: Backend, spec: Batch) -> None:
    """Makes the variables of layers, metrics and optimizers, as Keras' ``fit`` does.

    Args:
        model: Compiled.
        backend: The model is made for it.
        spec: ``tf.TensorSpec`` of a batch.

    Raises:
        UsageError: The step does not fit the data.
    """
    x, y, weight, *_ = without_none(spec)
    step = tf.function(lambda rows: model.train_step(packed(rows)), autograph=False)
    try:
        with backend.scope(), keras_compat.intercept(keras_compat.Hooks()):
            step.get_concrete_function(Rows(x, y, weight))
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        raise UsageError(
            f"the train_step of model {model.name!r} cannot be traced with rows of these "
            f"data: {type(error).__name__}: {first}",
            hint=f"see whether model.fit runs it, with run_eagerly=False; or {DROP_IN}",
        ) from error
