"""What several replicas and devices of one process have of one thing.

A value that is whole is one tensor for all devices, or has a copy on each: where variables
have copies, what is computed of them has, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from collective.training.partition.exchange import Exchange, Message
from collective.training.partition.graph import Node
from collective.training.partition.own import Own

Inputs: TypeAlias = Sequence[list[tf.Tensor] | None]
"""The tensors of each input of a node, or None for an unused one."""


def reduced(exchange: Exchange, message: Message) -> list[list[tf.Tensor]]:
    """Return the sums (maxima, ...) of partial values: of each one for all, or for each device."""
    values = message.values
    devices = len(exchange.devices)
    if not devices:
        sums = exchange.reduce(message)
        return [[total] for total in sums]
    shared = [len(own.parts) == 1 and devices > 1 for own in values]
    alone = [
        own.parts[0] for own, is_shared in zip(values, shared, strict=True) if is_shared
    ]
    split = [
        own for own, is_shared in zip(values, shared, strict=True) if not is_shared
    ]
    columns = [
        [Own(of_device(own.parts, number, devices), own.dtype) for own in split]
        for number in range(devices)
    ]
    totals = exchange.reduce_devices(message.kind, columns, alone)
    of_split, of_alone = iter(totals[: len(split)]), iter(totals[len(split) :])
    return [next(of_alone if is_shared else of_split) for is_shared in shared]


def of_device(
    parts: Sequence[tf.Tensor], device: int, devices: int
) -> Sequence[tf.Tensor]:
    """Return the parts of the replicas on one device."""
    return parts[
        _first(device, len(parts), devices) : _first(device + 1, len(parts), devices)
    ]


def first_replicas(replicas: int, times: int) -> set[int]:
    """Return the first replica of each of ``times`` devices."""
    return {_first(device, replicas, times) for device in range(times)}


def _first(device: int, replicas: int, devices: int) -> int:
    """Return the first replica of a device; not all devices have as many replicas."""
    return -(-device * replicas // devices)


def times_made(node: Node, inputs: Inputs) -> int:
    """Return how often a whole node is made: once, or on each device.

    What differs each time is made once; a variable is written where it has a copy.
    """
    variables = _widths_of_variables(node, inputs)
    if node.is_stateful and not variables:
        return 1
    return max(variables or [len(part) for part in inputs if part], default=1)


def placed_by_tensorflow(
    exchange: Exchange, times: int, node: Node, inputs: Inputs
) -> contextlib.AbstractContextManager[object]:
    """Surround a node that is bound to no device, or to that of a variable without copies.

    Args:
        times: How often it is made.
    """
    is_bound = times > 1 and 1 not in _widths_of_variables(node, inputs)
    if is_bound or not exchange.devices:
        return contextlib.nullcontext()
    return tf.device(None)


def _widths_of_variables(node: Node, inputs: Inputs) -> list[int]:
    """Return the number of copies of each variable that a node uses."""
    return [
        len(part)
        for value, part in zip(node.inputs, inputs, strict=True)
        if part and value.dtype == tf.resource
    ]
