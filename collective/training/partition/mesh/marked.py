"""The exchange of a pass over a model axis, whose collectives a later pass makes."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from collective.training.keras_compat import tensorflow_names
from collective.training.partition.exchange import (
    Message,
    OnOneDevice,
    Opens,
)
from collective.training.partition.markers import FIRST, GATHER, Marker, mark


class MarkedExchange(OnOneDevice):
    """Marks the exchanges of a rank of a model axis.

    Args:
        axis: The name of the axis.
        place: The rank's number along the axis.
        size: Ranks along the axis, at least two.
    """

    # A later pass does. Else a write that needs no row would seem to need one.
    holds_writes = False

    def __init__(self, axis: str, place: int, size: int):
        assert size > 1
        self._axis = axis
        self.place = place, size

    def of_marker(
        self, marker: Marker, op: tf.Operation, tensors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Leave a marker of another axis for the passes behind this one."""
        return list(tensorflow_names.copy_operation(op, tensors).outputs)

    def reduce(self, message: Message) -> list[tf.Tensor]:
        """Mark the reduction of tensors, of which this rank has one each."""
        assert not message.scattered
        return self._identities(message.kind, [own.parts[0] for own in message.values])

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Mark the gathering of a tensor along its first axis."""
        made = tf.concat([tensor] * self.place[1], 0)
        mark(made.op, Marker(self._axis, GATHER))
        return made

    def join(
        self, own: Sequence[tf.Tensor], shapes: Sequence[object], opens: Opens = ()
    ) -> list[tf.Tensor]:
        """Fail: pieces are of the axis of the batch, so this is never called."""
        raise NotImplementedError

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """Mark the tensor of the axis' first rank."""
        return self._identities(FIRST, [tensor])[0]

    def _identities(self, kind: str, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        made = list(tf.raw_ops.IdentityN(input=tensors))
        mark(made[0].op, Marker(self._axis, kind))
        return made
