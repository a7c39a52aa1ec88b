"""What is changed inside Keras for distributed optimizers; others are left alone.

Two methods, in place of which there is no way to ask for another behaviour.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from collective import session, tensorflow_ops
from collective.operations.kinds import Min
from collective.tensorflow.process_sets import group_of

LOG = logging.getLogger("collective")
IsDistributed = Callable[[Any], bool]


@functools.cache
def install(is_distributed: IsDistributed) -> None:
    """Changes the two methods, once.

    Args:
        is_distributed: Whether an optimizer reduces its gradients over the ranks.
    """
    _agree_on_overflow(is_distributed)
    _leave_out_xla(is_distributed)


def _agree_on_overflow(is_distributed: IsDistributed) -> None:
    """All ranks skip an update where one rank's gradients are not finite.

    Under mixed precision Keras looks for overflows before it calls the optimizer: one
    rank would skip, and the others would wait for its gradients.
    """
    kind = keras.optimizers.LossScaleOptimizer
    check_finite = kind.check_finite

    def everywhere(self: Any, grads: Any) -> tf.Tensor:
        finite = check_finite(self, grads)
        if not is_distributed(self):
            return finite
        process_set = self.inner_optimizer._reduction.process_set
        if not process_set.included():
            return finite
        (everyone,) = tensorflow_ops.all_reduce(
            [tf.cast(finite, tf.int32)], Min, None, group_of(process_set)
        )
        return tf.cast(everyone, tf.bool)

    kind.check_finite = everywhere


def _leave_out_xla(is_distributed: IsDistributed) -> None:
    """Switches off ``jit_compile``, which Keras chooses by itself on a GPU.

    XLA knows no op of ours, as it knows none of Horovod's by default.
    """
    make_train_function = keras.Model.make_train_function

    def without_xla(self: Any, force: bool = False) -> Any:
        if is_distributed(getattr(self, "optimizer", None)) and self.jit_compile:
            if session.is_initialized() and session.rank() == 0:
                LOG.warning("collective: jit_compile is off: XLA cannot sum over ranks")
            self.jit_compile = False
        return make_train_function(self, force)

    keras.Model.make_train_function = without_xla
