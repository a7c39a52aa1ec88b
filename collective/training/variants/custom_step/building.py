"""What a model with its own step needs before it trains: options, data, variables."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.input.pipeline import Batch
from collective.training.refusals import refuse
from collective.training.step.rows import Rows, or_none, without_none

#: What remains for a step that cannot be run here.
DROP_IN = (
    "train it by Keras' own fit with the drop-in: import collective.tensorflow.keras as "
    "hvd; hvd.init(); optimizer = hvd.DistributedOptimizer(optimizer)"
)


def check_options(
    model: keras.Model,
    backend: Backend,
    *,
    accumulate: int = 1,
    jit_compile: bool = False,
    recompute: bool = False,
    shard_optimizer: bool = False,
) -> None:
    """Refuses what cannot be done with a user's own step."""
    # A strategy forbids a train_step to write variables whose replicas differ.
    has_strategy = getattr(backend, "strategy", None) is not None
    in_strategy = has_strategy and backend.most_replicas > 1
    refused = {
        "accumulate: a train_step takes its batch in one piece": accumulate > 1,
        "jit_compile: sums over ranks are no part of a compiled program": jit_compile,
        "recompute": recompute,
        "shard_optimizer": shard_optimizer,
        "tensor parallelism": backend.tensor is not None,
        "layers on several devices": bool(backend.stages),
        "an elastic job: the updates of a train_step cannot be undone when a rank "
        "dies between two of them": backend.elastic,
        f"backend {backend.name!r}": not backend.synchronous or in_strategy,
    }
    refuse(
        f"model {model.name!r} has a train_step of its own, which cannot be combined with",
        refused,
        hint=f"leave that out, with --backend native or mpi; or {DROP_IN}",
    )


def packed(rows: Rows) -> Any:
    """The ``data`` of a step, as Keras' ``fit`` gives them.

    Floating-point rows have the precision that Keras converts arrays to.
    """
    dtype = keras.config.floatx()
    cast = tf.nest.map_structure(
        lambda t: tf.cast(t, dtype) if t.dtype.is_floating else t, rows
    )
    return keras.utils.pack_x_y_sample_weight(*map(or_none, cast))


def build(model: keras.Model, backend: Backend, spec: Batch) -> None:
    """Makes the variables of layers, metrics and optimizers, as Keras' ``fit`` does."""
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
