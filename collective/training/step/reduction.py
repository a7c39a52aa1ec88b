"""The plain exchange: one all-reduce for everything that a step sums over replicas."""

from __future__ import annotations

import tensorflow as tf

from collective.backends.base import Backend
from collective.tensorflow_ops.ranks import run_independently
from collective.training.step.clock import now
from collective.training.step.found import Found
from collective.training.step.parts import Span, StepSums
from collective.training.variables import SMALL


class AllReduce:
    """Sums over all replicas by one all-reduce; see ``Exchange``.

    Args:
        dtype: All tensors travel in it; state that it cannot hold travels in float64, in
            an all-reduce of its own.
    """

    def __init__(self, backend: Backend, dtype: tf.DType):
        self.backend = backend
        self.dtype = dtype

    def __call__(self, local: StepSums, found: Found) -> tuple[StepSums, Span]:
        """Inside ``Backend.run``: the sums, and the time that the all-reduce took."""
        state = local.sums.state
        exact = [i for i, t in enumerate(state) if t.dtype.size > self.dtype.size]
        rest = [t for i, t in enumerate(state) if i not in exact]
        local = local._replace(sums=local.sums._replace(state=rest))
        local = tf.nest.map_structure(lambda t: tf.cast(t, self.dtype), local)
        tensors = tf.nest.flatten(local)
        ids = {id(t) for t in tf.nest.flatten(local.sums.gradients)}
        rounded = [place for place, t in enumerate(tensors) if id(t) in ids]
        with tf.control_dependencies(tensors):
            start = now()
        if self.backend.overlaps:
            run_independently(start)  # a bucket would wait for it, and all gradients
        else:
            with tf.control_dependencies([start]):
                tensors = [tf.identity(t) for t in tensors]
        reduced = sum_tensors(self.backend, tensors, rounded)
        with tf.control_dependencies([start, *reduced]):
            stop = now()
        total = tf.nest.pack_sequence_as(local, reduced)
        if exact:
            with tf.control_dependencies(reduced):
                wide = [tf.identity(state[i]) for i in exact]
            sums = iter(self.backend.all_reduce(wide))
            others = iter(total.sums.state)
            state = [next(sums if i in exact else others) for i in range(len(state))]
            total = total._replace(sums=total.sums._replace(state=state))
        return total, Span(start, stop)


def sum_tensors(
    backend: Backend, tensors: list[tf.Tensor], rounded: list[int]
) -> list[tf.Tensor]:
    """Sums in one call; scalars and small vectors travel in one tensor.

    Args:
        tensors: The local sums, of one dtype.
        rounded: Places of the gradients, which may travel in 16 bits.
    """
    small = [i for i, t in enumerate(tensors) if is_small(t)]
    if not small:
        return list(backend.all_reduce(tensors, rounded))
    large = [i for i in range(len(tensors)) if i not in set(small)]
    flat = tf.concat([tf.reshape(tensors[i], [-1]) for i in small], axis=0)
    head, *rest = backend.all_reduce(
        [flat, *(tensors[i] for i in large)],
        [1 + large.index(i) for i in rounded if i in large],
    )
    sizes = [tensors[i].shape.num_elements() for i in small]
    total = dict(zip(large, rest, strict=True))
    for i, piece in zip(small, tf.split(head, sizes), strict=True):
        total[i] = tf.reshape(piece, tensors[i].shape)
    return [total[i] for i in range(len(tensors))]


def is_small(tensor: tf.Tensor) -> bool:
    """Whether its shape is known, and it travels with others."""
    size = tensor.shape.num_elements()
    return size is not None and size <= SMALL
