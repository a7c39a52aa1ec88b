"""The exchange of virtual replicas: sums along a fixed tree of pieces."""

from __future__ import annotations

import tensorflow as tf

from collective.backends.base import Backend
from collective.training.step.clock import now
from collective.training.step.found import Found
from collective.training.step.parts import Span, StepSums
from collective.training.step.reduction import sum_tensors
from collective.training.variants.virtual.pieces import VirtualReplicas
from collective.training.variants.virtual.sums import SubtreeSums, replica_number
from collective.training.variants.virtual.tree import total


class TreeExchange:
    """Sums over all pieces of a global batch; see ``Exchange``.

    The same bits for any number of replicas.

    Args:
        dtype: Of all that is not in the vectors of ``PieceSums``.
    """

    def __init__(self, virtual: VirtualReplicas, backend: Backend, dtype: tf.DType):
        self.virtual = virtual
        self.backend = backend
        self.dtype = dtype

    def __call__(self, local: StepSums, found: Found) -> tuple[StepSums, Span]:
        """Inside ``Backend.run``: the sums, and the time that the exchange took."""
        backend, subtrees = self.backend, local.sums
        assert isinstance(subtrees, SubtreeSums)
        with tf.control_dependencies(tf.nest.flatten(subtrees.vectors)):
            start = now()
            sums = tf.nest.map_structure(tf.identity, subtrees.vectors)
        attached = tf.nest.flatten(local.attached)
        others = [tf.cast(t, self.dtype) for t in [local.not_finite, *attached]]
        located, *others = sum_tensors(backend, others, [])
        with tf.control_dependencies([located]):  # one collective after the other
            sums = tf.nest.map_structure(tf.identity, sums)
        replica, always = replica_number(backend), subtrees.number >= 0
        vectors = total(self.virtual, backend, replica, sums, always=always)
        with tf.control_dependencies([start, *vectors]):
            stop = now()
        attached = tf.nest.pack_sequence_as(local.attached, others)
        whole = subtrees.layout.unpack(vectors)
        return StepSums(whole, located, attached), Span(start, stop)
