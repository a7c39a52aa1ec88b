"""Gradients of several backward passes, added up before they are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from collective.tensorflow.gradients import Tensor
from collective.tensorflow.variables import tf_variable


class Accumulation:
    """Sums of gradients, and how many passes are in them.

    Its variables are its own: a saved optimizer is as without it.

    Args:
        passes: How many make an update.
        average: Whether their mean is applied, not their sum.
    """

    def __init__(self, passes: int, average: bool):
        self.passes = passes
        self.average = average
        self.count: Any = None  # a tf.Variable from the first pass on
        self.sums: list[tf.Variable] = []
        # Of those variables that a gradient was ever seen for.
        self.seen: list[bool] = []

    def add(self, gradients: Sequence[Tensor | None], variables: Sequence[Any]) -> None:
        """Adds the gradients of one pass; sparse ones become dense.

        Raises:
            ValueError: If these are not the variables of the passes before.
        """
        if self.count is None:
            # Also when a function is traced, variables are made outside of it.
            with tf.init_scope():
                self.count = tf.Variable(0, trainable=False, dtype=tf.int64)
                self.sums = [
                    tf.Variable(
                        tf.zeros(v.shape, tf_variable(v).dtype), trainable=False
                    )
                    for v in variables
                ]
            self.seen = [False] * len(self.sums)
        if len(variables) != len(self.sums):
            raise ValueError(
                f"{len(variables)} variables, and {len(self.sums)} in the passes before\n"
                "HINT: with backward_passes_per_step, always pass the same variables"
            )
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                self.seen[place] = True
                total = self.sums[place]
                total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))
        self.count.assign_add(1)

    def full(self) -> tf.Tensor:
        """Whether as many passes are in it as make an update."""
        return tf.equal(self.count, self.passes)

    def pending(self) -> bool:
        """Whether passes are in it that no update has used; eager only."""
        return self.count is not None and int(self.count) > 0

    def take(self) -> list[tf.Tensor | None]:
        """The sums or means, and empties it."""
        divisor = self.count.read_value() if self.average else tf.constant(1, tf.int64)
        taken = [
            total.read_value() / tf.cast(divisor, total.dtype) if seen else None
            for total, seen in zip(self.sums, self.seen, strict=True)
        ]
        with tf.control_dependencies([t for t in taken if t is not None]):
            for total in self.sums:
                total.assign(tf.zeros_like(total))
            self.count.assign(0)
        return taken
