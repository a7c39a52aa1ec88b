"""The exchange of a sharded optimizer: each rank gets the sums of its own shards."""

from __future__ import annotations

import tensorflow as tf

from collective.backends.base import Backend
from collective.training.step.found import Found
from collective.training.step.parts import Span, StepSums
from collective.training.step.reduction import AllReduce
from collective.training.variants.memory.sharded_optimizer import ShardedOptimizer


class ReduceScatter(AllReduce):
    """An all-reduce without the gradients, which are reduce-scattered.

    Args:
        dtype: As for ``AllReduce``.
        shards: Of the variables.
    """

    def __init__(self, backend: Backend, dtype: tf.DType, shards: ShardedOptimizer):
        super().__init__(backend, dtype)
        self.shards = shards

    def __call__(self, local: StepSums, found: Found) -> tuple[StepSums, Span]:
        """Inside ``Backend.run``; the span is that of the all-reduce."""
        gradients = local.sums.gradients
        rest = local._replace(sums=local.sums._replace(gradients=[]))
        total, span = super().__call__(rest, found)
        flat = [tf.cast(g, self.dtype) for g in tf.nest.flatten(gradients)]
        own = tf.nest.pack_sequence_as(gradients, self.shards.reduce_scatter(flat))
        return total._replace(sums=total.sums._replace(gradients=own)), span
