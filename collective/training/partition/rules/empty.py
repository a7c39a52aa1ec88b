"""Operations whose kernels take no tensor without rows, which some replica may have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.partition.graph import Node, Value
from collective.training.partition.known import on_host
from collective.training.partition.layouts import Sharded
from collective.training.partition.plans import Plan, Rule
from collective.training.partition.sizes import AnySize

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission


def with_a_row(
    plan: Plan | None, node: Node, filled: Mapping[int, int] = MappingProxyType({})
) -> Plan | None:
    """Return the plan of a plain operation, made on a row of zeros if there is none.

    What it makes of that row is cut off, or adds nothing to a sum.

    Args:
        filled: By the place of an input: what is in that row instead of zeros.
    """
    if plan is None or not any(isinstance(lay, Sharded) for lay in plan.inputs):
        return plan
    assert plan.emit is None, node

    def emit(emission: Emission, x: list[tf.Tensor]) -> list[tf.Tensor]:
        if isinstance(emission.own_rows, int) and emission.own_rows:
            return emission.copy(node, x)
        given = [
            _padded(emission, value, tensor, layout, filled.get(place, 0))
            if isinstance(layout, Sharded)
            else tensor
            for place, (value, tensor, layout) in enumerate(
                zip(node.inputs, x, plan.inputs, strict=True)
            )
        ]
        made = emission.copy(node, given)
        return [
            _cut(emission, value, tensor, layout)
            if isinstance(layout, Sharded)
            else tensor
            for value, tensor, layout in zip(
                node.outputs, made, plan.outputs, strict=True
            )
        ]

    return dataclasses.replace(plan, emit=emit)


def rows_wanted(of: Rule) -> Rule:
    """Return the rule of operations whose kernels want a row."""
    return lambda node, layouts, rows: with_a_row(of(node, layouts, rows), node)


def _padded(
    emission: Emission, value: Value, tensor: tf.Tensor, layout: Sharded, filled: int
) -> tf.Tensor:
    """Append a row if there are none; otherwise copies nothing."""
    rank, axis = tensor.shape.rank, layout.axis

    def pads() -> tf.Tensor:
        with on_host():
            is_empty = tf.cast(tf.equal(emission.own, 0), tf.int64)
            missing = (is_empty * emission.number(layout.per_row))[None, None]
            return tf.pad(missing, [[axis, rank - axis - 1], [1, 0]])

    def padded() -> tf.Tensor:
        amounts = emission.once(("a row", rank, layout), pads)
        # Not by Pad: oneDNN takes that into a convolution after it, without the row.
        content = tf.constant(filled, tensor.dtype)
        return tf.raw_ops.PadV2(input=tensor, paddings=amounts, constant_values=content)

    key = "with a row", value, layout, *([filled] if filled else [])
    return emission.once(key, padded)


def _cut(
    emission: Emission, value: Value, tensor: tf.Tensor, layout: Sharded
) -> tf.Tensor:
    """Remove the row. Another operation that needs one gets the padded tensor again.

    So oneDNN finds a pooling whose gradient it makes, and hands on what it knows of it.
    """
    emission.once(("with a row", value, layout), lambda: tensor)
    rank = tensor.shape.rank
    ends: list[AnySize] = [-1] * rank
    ends[layout.axis] = emission.own_rows * layout.per_row
    return tf.slice(tensor, emission.vector([0] * rank), emission.vector(ends))
