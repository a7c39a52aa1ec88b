"""What several replicas and devices of one process have of one thing.

A value that is whole is one tensor for all devices, or has a copy on each: where variables
have copies, what is computed of them has, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from collective.training.partition.exchange import Exchange
from collective.training.partition.graph import Node

Inputs: TypeAlias = Sequence[list[tf.Tensor] | None]
"""Of each input of a node its tensors; None of one that is not used."""

_COMBINE = {
    "sum": tf.add_n,
    "max": lambda parts: tf.reduce_max(tf.stack(parts), 0),
    "min": lambda parts: tf.reduce_min(tf.stack(parts), 0),
    "prod": lambda parts: tf.reduce_prod(tf.stack(parts), 0),
    "any": lambda parts: tf.reduce_any(tf.stack(parts), 0),
    "all": lambda parts: tf.reduce_all(tf.stack(parts), 0),
}


def reduced(
    exchange: Exchange, kind: str, parts: list[list[tf.Tensor]], more: list[tf.Tensor]
) -> list[list[tf.Tensor]]:
    """The sums (maxima, ...) of partial values: of each one for all, or for each device.

    Args:
        parts: Of each value, those of the replicas of this process.
        more: Tensors of this process, whose sums come behind.
    """
    devices = exchange.devices
    if not devices:
        sums = [_combined(kind, of_one) for of_one in parts]
        return [[total] for total in exchange.reduce(kind, [*sums, *more])]
    columns = []
    for number, device in enumerate(devices):
        with tf.device(device):
            columns.append(
                [
                    _combined(kind, _of_device(of_one, number, len(devices)))
                    for of_one in parts
                ]
            )
    return exchange.reduce_devices(kind, columns, more)


def _of_device(
    parts: list[tf.Tensor], device: int, devices: int
) -> Sequence[tf.Tensor]:
    """The parts of the replicas on one device."""
    size = len(parts) // devices
    return parts[device * size : (device + 1) * size]


def _combined(kind: str, parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum (maximum, ...) of parts."""
    return parts[0] if len(parts) == 1 else _COMBINE[kind](parts)


def times_made(node: Node, inputs: Inputs) -> int:
    """How often a whole node is made: once, or on each device.

    What differs each time is made once; a variable is written where it has a copy.
    """
    variables = _widths_of_variables(node, inputs)
    if node.is_stateful and not variables:
        return 1
    return max(variables or [len(part) for part in inputs if part], default=1)


def placed_by_tensorflow(
    exchange: Exchange, times: int, node: Node, inputs: Inputs
) -> contextlib.AbstractContextManager[Any]:
    """Around a node that is bound to no device, or to that of a variable without copies.

    Args:
        times: How often it is made.
    """
    is_bound = times > 1 and 1 not in _widths_of_variables(node, inputs)
    if is_bound or not exchange.devices:
        return contextlib.nullcontext()
    return tf.device(None)


def _widths_of_variables(node: Node, inputs: Inputs) -> list[int]:
    """Of each variable that a node uses, how many copies there are."""
    return [
        len(part)
        for value, part in zip(node.inputs, inputs, strict=True)
        if part and value.dtype == tf.resource
    ]
