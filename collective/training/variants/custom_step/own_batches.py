"""``per_replica``: each replica runs a ``train_step`` on a batch of its own.

For steps that are none of a part of a batch: their loss couples rows (contrastive, metric
learning), or their code has the number of rows as a constant. What tf.distribute and
Horovod do with any model: gradients, state and metrics are means over replicas, weighted
by rows. N replicas then train another model than one, so it is asked for by name, and said
at the start, in the summary and in ``History``.
"""

from __future__ import annotations

import contextlib
from typing import Any
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.log import log
from collective.training import keras_compat
from collective.training.variants.custom_step.replica import ReplicaHooks

#: False; True: a replica's rows of each batch; ``batch``: each replica has whole batches.
CHOICES = (False, True, "batch")
#: What the errors of the check say.
HINT = (
    "whole_batch=True (--set whole_batch=True): rank 0 computes whole batches alone, the "
    "same numbers; or per_replica=True: each replica's rows are a batch of their "
    "own, which trains another model than one process; per_replica='batch', where the "
    "code knows the number of rows of a batch"
)

_trained: WeakKeyDictionary[keras.Model, bool | str] = WeakKeyDictionary()


class OwnBatchHooks(ReplicaHooks):
    """The intercepted calls of a replica whose rows are a batch of their own."""

    def drawing(self, rows: Any) -> contextlib.AbstractContextManager[list[str]]:
        """Numbers of its own: replica 0 draws those of one process."""
        replica = int(tf.get_static_value(self.backend.replica()))
        return keras_compat.draw_as_replica(replica)

    def on_loss(
        self, loss: Any, values: Any, weight: Any, mask: Any, reduction: str
    ) -> Any:
        """As Keras computes it of these rows."""
        return loss


def chosen(
    wanted: bool | str, model: keras.Model, backend: Backend, batch_rows: int | None
) -> bool | str:
    """What ``per_replica`` means for a training; rank 0 says it.

    Args:
        wanted: One of ``CHOICES``.
        batch_rows: Rows of a batch of the data; None where they are not known.

    Returns:
        False with one replica, which has whole batches as it is.

    Raises:
        UsageError: It is none of the choices, or not one for this model.
    """
    if wanted not in CHOICES:
        raise UsageError(
            f"per_replica={wanted!r} is unknown",
            hint="per_replica=True or per_replica='batch'",
        )
    if wanted and not keras_compat.overrides(model, "train_step"):
        raise UsageError(
            f"per_replica is for a train_step of the model's own, and model "
            f"{model.name!r} has Keras', whose loss and metrics have whole batches",
            hint="drop per_replica",
        )
    replicas = backend.most_replicas
    _trained.pop(model, None)
    if not wanted or replicas == 1:
        return False
    _trained[model] = wanted
    if backend.rank == 0:
        log.warning(
            "per_replica: each of %d replicas runs train_step of %r on %s; gradients, "
            "metrics and state are averaged by rows: another model than that of one "
            "process",
            *(replicas, model.name, _in_words(wanted, batch_rows, replicas)),
        )
    return wanted


def _in_words(wanted: bool | str, batch_rows: int | None, replicas: int) -> str:
    """What a replica's rows are."""
    if wanted == "batch":
        rows = f" of {batch_rows} rows" if batch_rows else ""
        return f"a whole batch{rows}, so an update has those of {replicas} batches"
    if batch_rows is None:
        return f"a batch of its own, 1/{replicas} of each batch"
    size = f"{batch_rows // replicas}"
    if batch_rows % replicas:
        size += f" or {batch_rows // replicas + 1}"
    return f"a batch of its own, {size} of the {batch_rows} rows of each batch"


def trained_with(model: keras.Model) -> bool | str:
    """The ``per_replica`` of a model's last training: its evaluation has the same."""
    return _trained.get(model, False) if isinstance(model, keras.Model) else False
