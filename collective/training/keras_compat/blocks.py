"""How many batches stand one behind the other in a tensor's first axis.

A discriminator that sees generated and real images in one batch, two views of each image
of a contrastive loss: ``concat([a, b])`` has the rows of the batch twice. An axis of
patches that is folded into that of the rows has the patches of one row side by side. Both
have a multiple of the rows; the operations that made a tensor tell them apart.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import tensorflow as tf


def blocks_of(shape: tf.Tensor, single: set[Any]) -> int:
    """Of the tensor whose shape this is: 1, or how many batches it holds.

    Args:
        shape: In a graph, as ``tf.shape`` gives it, or made of its entries.
        single: References of tensors behind which no batches are joined. It grows, so
            that the draws of one graph look at each tensor once.
    """
    seen, pending = set(), deque([shape])
    while pending:
        tensor = pending.popleft()
        if tensor.ref() in seen or tensor.ref() in single:
            continue
        seen.add(tensor.ref())
        if (found := _joined(tensor.op)) > 1:
            return found
        pending += _sources(tensor)
    single |= seen
    return 1


def _joined(operation: Any) -> int:
    """How many batches an operation puts one behind the other; 1 for most."""
    kind = operation.type
    if kind == "ConcatV2":
        *parts, axis = operation.inputs
        rows = [part for part in parts if part.shape.rank and part.shape[0] is None]
        return len(rows) if rows and tf.get_static_value(axis) == 0 else 1
    if kind == "Pack":
        rows = [part for part in operation.inputs if part.shape[:1] == [None]]
        return max(1, len(rows)) if operation.get_attr("axis") == 0 else 1
    if kind == "Tile":
        tiled, multiples = operation.inputs
        known = tf.get_static_value(multiples)
        of_rows = tiled.shape.rank and tiled.shape[0] is None
        return int(known[0]) if of_rows and known is not None else 1
    return 1


def _sources(tensor: tf.Tensor) -> list[tf.Tensor]:
    """The tensors of rows that a tensor, or a shape, was computed from."""
    return [
        source
        for source in tensor.op.inputs
        if not source.shape.is_fully_defined() or source.dtype in (tf.int32, tf.int64)
    ]
