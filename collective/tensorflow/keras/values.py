"""Collectives on anything that is like a tensor: numbers, lists, arrays."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.operations.kinds import Average
from collective.tensorflow import collectives
from collective.tensorflow.compression import Compression, Compressor
from collective.tensorflow.reductions import Reduction


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Reduction | None = None,
    compression: type[Compressor] = Compression.none,
) -> tf.Tensor:
    """As ``collective.tensorflow.allreduce``."""
    return collectives.allreduce(
        value,
        average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """As ``collective.tensorflow.allgather``."""
    return collectives.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """As ``collective.tensorflow.broadcast``."""
    return collectives.broadcast(value, root_rank, name)


def reducescatter(
    value: Any, name: str | None = None, op: Reduction = Average
) -> tf.Tensor:
    """As ``collective.tensorflow.reducescatter``."""
    return collectives.reducescatter(value, op=op, name=name)
