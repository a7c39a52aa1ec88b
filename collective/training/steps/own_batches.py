"""``per_replica``: each replica runs ``train_step`` on a batch of its own.

tf.distribute and Horovod do this with any model. Gradients, state and metrics are means over
replicas, weighted by rows; a loss that couples rows and a BatchNormalization see the rows
of one replica. N replicas then train a different model from one, so it must be asked for by
name, and is reported at the start, in the summary and in ``History``.
"""

from __future__ import annotations

import keras

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.log import log
from collective.training.model.record import record_of

#: False; True: a replica's rows of each batch; ``batch``: each replica has whole batches.
CHOICES = (False, True, "batch")


def chosen(wanted: bool | str, backend: Backend) -> bool | str:
    """Return the meaning of ``per_replica`` on a backend.

    Args:
        wanted: One of ``CHOICES``.

    Returns:
        False with one replica, which has whole batches anyway.

    Raises:
        UsageError: It is none of the choices.
    """
    if wanted not in CHOICES:
        raise UsageError(
            f"per_replica={wanted!r} is unknown",
            hint="per_replica=True or per_replica='batch'",
        )
    return wanted if backend.most_replicas > 1 else False


def begin(
    choice: bool | str, model: keras.Model, backend: Backend, batch_rows: int | None
) -> None:
    """Note with what a model is trained; rank 0 reports it.

    Args:
        choice: What ``chosen`` has returned.
        batch_rows: Rows of a batch of the data, or None if they are not known.
    """
    record_of(model).per_replica = choice
    if choice and backend.rank == 0:
        log.warning(
            "per_replica: each of %d replicas runs train_step of %r on %s; gradients, "
            "metrics and state are averaged by rows: another model than that of one "
            "process",
            backend.most_replicas,
            model.name,
            _in_words(choice, batch_rows, backend.most_replicas),
        )


def _in_words(wanted: bool | str, batch_rows: int | None, replicas: int) -> str:
    """Say which rows a replica has."""
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
    """Return the ``per_replica`` of a model's last training, for its evaluation."""
    return record_of(model).per_replica
