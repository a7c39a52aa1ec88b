"""Operations whose kernels take no tensor without rows, which some replica may have."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from collective.training.partition.graph import Node
from collective.training.partition.layouts import Sharded
from collective.training.partition.propagation import Plan


def with_a_row(node: Node, plan: Plan | None) -> Plan | None:
    """The plan of a plain operation, which is made on a row of zeros where there is none.

    What it makes of that row is cut off, or adds nothing to a sum.
    """
    if plan is None or not any(isinstance(lay, Sharded) for lay in plan.inputs):
        return plan
    assert plan.emit is None, node

    def emit(emission: Any, x: list[Any]) -> list[tf.Tensor]:
        given = [
            _padded(emission, tensor, layout) if isinstance(layout, Sharded) else tensor
            for tensor, layout in zip(x, plan.inputs, strict=True)
        ]
        return [
            _cut(emission, tensor, layout) if isinstance(layout, Sharded) else tensor
            for tensor, layout in zip(
                emission.copy(node, given), plan.outputs, strict=True
            )
        ]

    return dataclasses.replace(plan, emit=emit)


def _padded(emission: Any, tensor: tf.Tensor, layout: Sharded) -> tf.Tensor:
    """With zeros behind, if there are no rows; else nothing is copied."""
    rank, axis = tensor.shape.rank, layout.axis

    def pads() -> tf.Tensor:
        is_empty = tf.cast(tf.equal(emission.own, 0), tf.int64)
        missing = (is_empty * emission.number(layout.per_row))[None, None]
        return tf.pad(missing, [[axis, rank - axis - 1], [1, 0]])

    return tf.pad(tensor, emission.once(("a row", rank, layout), pads))


def _cut(emission: Any, tensor: tf.Tensor, layout: Sharded) -> tf.Tensor:
    rank = tensor.shape.rank
    ends = [-1] * rank
    ends[layout.axis] = emission.own_rows * layout.per_row
    return tf.slice(tensor, emission.vector([0] * rank), emission.vector(ends))
