"""Sums over ranks in the order of the program, eagerly and in graphs."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from collective.backends.base import Backend
from collective.training.step.reduction import sum_tensors
from collective.training.variables import SMALL


class LoopSums:
    """All-reduces that run in the order of the program, on every rank.

    As ``variants.custom_step.replica.OrderedSums``, for tensors of any shapes.
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        with tf.device("CPU"):
            self.order = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._in_graph = tf.function(self._sum, autograph=False)

    def __call__(
        self, tensors: Sequence[tf.Tensor], gradients: int = 0
    ) -> list[tf.Tensor]:
        """Sums tensors of one dtype; the first ``gradients`` of them are gradients."""
        if tf.executing_eagerly():  # backends sum within a graph
            values = [tf.constant(t.numpy()) for t in tensors]  # no tape's
            specs = [tf.TensorSpec(_open(v), v.dtype) for v in values]
            return list(self._in_graph.get_concrete_function(specs)(*values))
        with tf.control_dependencies(list(tensors)):
            begin = self.order.assign_add(1, read_value=False)
        with tf.control_dependencies([begin]):
            tensors = [tf.identity(t) for t in tensors]
        totals = self._sum(tensors, gradients)
        with tf.control_dependencies(totals):
            self.order.assign_add(1, read_value=False)
        return totals

    def _sum(self, tensors: list[tf.Tensor], gradients: int = 0) -> list[tf.Tensor]:
        sizes = [t.shape.num_elements() for t in tensors]
        packs = None not in sizes and min(sizes) <= SMALL
        if packs:
            return sum_tensors(self.backend, tensors, list(range(gradients)))
        totals = self.backend.all_reduce(tensors, range(gradients))
        for total, tensor in zip(totals, tensors, strict=True):
            total.set_shape(tensor.shape)
        return totals


def _open(value: tf.Tensor) -> list[int | None]:
    """The shape, open where rows of tables or batches are: one trace for all."""
    if value.shape.num_elements() <= SMALL:
        return list(value.shape)
    return [None, *value.shape[1:]]
