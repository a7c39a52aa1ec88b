"""What is said of a training with a hook: how many bytes it saves, and at what price."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from collective.training.hooks.hook import CommunicationHook

#: Every output names a training with a hook so.
NOT_EQUAL = "not equal to one process"


def warning(
    hook: CommunicationHook, shapes: Sequence[Sequence[int]], width: int, verified: bool
) -> str:
    """What is said at the start of a training.

    Args:
        shapes: Of the gradients.
        width: Bytes of a number.
        verified: Whether the step is compared with Keras' own.
    """
    before = sum(math.prod(shape) for shape in shapes)
    now = elements_sent(hook, shapes)
    text = (
        f"hook {hook!r}: the trained model is {NOT_EQUAL}, for gradients are compressed: "
        f"{now * width:,} bytes a step instead of {before * width:,}, "
        f"{before / now:.1f} times fewer"
    )
    if verified:
        text += "; the step was compared with Keras' own without the hook"
    return text


def elements_sent(hook: CommunicationHook, shapes: Sequence[Sequence[int]]) -> int:
    """Numbers that a replica sends of gradients of these shapes, in one step."""
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
