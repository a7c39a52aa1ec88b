"""The report of a training step: what observers read of it, one vector of float64.

Its numbers are the loss of the batch alone, the rows of the batch, and when the first sum
over the replicas began and the last one ended, in seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

LOSS, ROWS, REDUCE_START, REDUCE_STOP = range(4)
SIZE = 4


def loss(losses: Sequence[tf.Tensor], outputs: Any) -> tf.Tensor:
    """Return the loss of the batch alone, a scalar, while the step is traced.

    Args:
        losses: Those that the model has tracked in the step.
        outputs: What the step returns; its first scalar counts if nothing was tracked.
    """
    if isinstance(outputs, Mapping):
        returned = list(flat_logs(outputs).values())  # in the order of the step
    else:
        returned = tf.nest.flatten(outputs)
    # A metric may return its variable, of which Keras' dtype is text.
    leaves = [tf.convert_to_tensor(t) for t in returned if tf.is_tensor(t)]
    scalars = [t for t in leaves if t.shape.rank == 0 and t.dtype.is_floating]
    found = next(iter([*losses, *scalars]), tf.zeros([]))
    return tf.reduce_mean(found)  # Keras shows the mean of one loss for each row


def line(
    loss: tf.Tensor, rows: tf.Tensor, span: tuple[tf.Tensor, tf.Tensor]
) -> tf.Tensor:
    """Return the report, float64 of shape ``[4]``."""
    return tf.stack([tf.cast(part, tf.float64) for part in (loss, rows, *span)])


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return returned values by name, as Keras shows them, with inner dicts dissolved.

    A metric's result may be a dict. For all compiled metrics it is one, as in
    ``{m.name: m.result() for m in self.metrics}``.
    """
    found: dict[str, Any] = {}
    for name, value in logs.items():
        found |= flat_logs(value) if isinstance(value, Mapping) else {name: value}
    return found
