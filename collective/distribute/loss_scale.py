"""Overflows that Keras' ``LossScaleOptimizer`` looks for, on all replicas at once.

Keras asks each process whether the gradients of its first replica are finite, as if they
were summed already. Where they are not on one rank only, that rank would leave the step out,
and the others wait for its gradients, or take those of its next step.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from collective.distribute.extended import Extended


@functools.cache
def look_on_all_replicas() -> None:
    """From now on, in the replicas of our strategies; a second call does nothing."""
    kind = keras.optimizers.LossScaleOptimizer
    stock = kind.check_finite

    @functools.wraps(stock)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = stock(self, grads)
        extended = tf.distribute.get_strategy().extended
        if not isinstance(extended, Extended) or extended._num_replicas_in_sync == 1:
            return finite
        overflows = tf.cast(tf.logical_not(finite), tf.float32)
        context = tf.distribute.get_replica_context()
        return tf.equal(context.all_reduce("SUM", overflows), 0.0)

    kind.check_finite = check_finite
