"""Tells how many bytes a hook saves, and at what price."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.fit_options import NOT_EQUAL
from collective.training.compression.hook import CommunicationHook
from collective.training.model.variables import dtype_of_sums


def warning(hook: CommunicationHook, variables: Sequence[keras.Variable]) -> str:
    """Return the warning for the start of a training.

    Args:
        variables: The trained variables.
    """
    before, now = gradient_bytes(variables), gradient_bytes(variables, hook)
    return (
        f"hook {hook!r}: the trained model is {NOT_EQUAL}, for gradients are compressed: "
        f"{now:,} bytes a step instead of {before:,}, "
        f"{before / now:.1f} times fewer"
    )


def gradient_bytes(
    variables: Sequence[keras.Variable],
    hook: CommunicationHook | None = None,
    rounds_to: str | None = None,
) -> int:
    """Return the bytes of gradients that a replica sends in one step.

    Args:
        rounds_to: The dtype in which a backend sends large gradients.
    """
    width = tf.as_dtype(rounds_to).size if rounds_to else dtype_of_sums(variables).size
    shapes = [tuple(v.shape) for v in variables]
    if hook is not None:
        return width * elements_sent(hook, shapes)
    return width * sum(map(math.prod, shapes))


def elements_sent(hook: CommunicationHook, shapes: Sequence[Sequence[int]]) -> int:
    """Return how many numbers a replica sends in one step for gradients of these shapes."""
    compressed = [list(shape) for shape in shapes if hook.compresses(shape)]
    sent = sum(math.prod(shape) for shape in shapes if not hook.compresses(shape))

    def count(tensors: Sequence[Any]) -> list[Any]:
        nonlocal sent
        sent += sum(t.shape.num_elements() for t in tensors)
        return list(tensors)

    def exchange(*gradients: tf.Tensor) -> None:
        starts = [hook.start(shape, i) for i, shape in enumerate(compressed)]
        shared = [[tf.constant(a, tf.float32) for a in arrays] for arrays in starts]
        hook.exchange(gradients, shared, count)

    if compressed:  # traced, not run
        specs = [tf.TensorSpec(shape, tf.float32) for shape in compressed]
        tf.function(exchange, autograph=False).get_concrete_function(*specs)
    return sent
