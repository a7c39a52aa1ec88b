"""One all-reduce for everything that a step sums over replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from collective.backends.base import Backend
from collective.training.step.attachments import Attachment
from collective.training.step.forward import Sums
from collective.training.variables import SMALL
from collective.training.variants.memory.partitioned import PartitionedVariables


class StepSums(NamedTuple):
    """What a step sums over replicas.

    Attributes:
        sums: Losses, gradients, metrics, state.
        not_finite: See ``collective.training.step.finite.at_replica``.
        attached: The tensors of each attachment.
    """

    sums: Sums
    not_finite: tf.Tensor
    attached: list[list[tf.Tensor]]


class Span(NamedTuple):
    """When the all-reduce started and stopped: float64 scalars, seconds since 1970."""

    start: tf.Tensor
    stop: tf.Tensor


def all_reduce(
    local: StepSums,
    dtype: tf.DType,
    backend: Backend,
    partition: PartitionedVariables | None,
    attachments: Sequence[Attachment],
) -> tuple[StepSums, Span]:
    """Sums over all replicas, inside ``Backend.run``.

    Args:
        local: This replica's sums.
        dtype: All tensors travel in it; state that it cannot hold travels in float64,
            in an all-reduce of its own.
        partition: Where gradients are reduce-scattered, they take no part in the
            all-reduce; each rank gets the sums of its own shards.
        attachments: Of ``local.attached``.

    Returns:
        The sums, and the time that the all-reduce took.
    """
    state = local.sums.state
    exact = [i for i, t in enumerate(state) if t.dtype.size > dtype.size]
    rest = [t for i, t in enumerate(state) if i not in exact]
    local = local._replace(sums=local.sums._replace(state=rest))
    local = tf.nest.map_structure(lambda t: tf.cast(t, dtype), local)
    gradients = local.sums.gradients
    scatters = partition if partition and partition.scatters_gradients else None
    if scatters is not None:
        local = local._replace(sums=local.sums._replace(gradients=[]))
    tensors = tf.nest.flatten(local)
    ids = {id(t) for t in tf.nest.flatten(local.sums.gradients)}
    rounded = [place for place, t in enumerate(tensors) if id(t) in ids]
    with tf.control_dependencies(tensors):
        start = tf.timestamp()
    if not backend.overlaps:
        with tf.control_dependencies([start]):
            tensors = [tf.identity(t) for t in tensors]
    reduced = sum_tensors(backend, tensors, rounded)
    with tf.control_dependencies([start, *reduced]):
        stop = tf.timestamp()
    total = tf.nest.pack_sequence_as(local, reduced)
    if scatters is not None:
        shards = scatters.reduce_scatter(tf.nest.flatten(gradients))
        gradients = tf.nest.pack_sequence_as(gradients, shards)
        total = total._replace(sums=total.sums._replace(gradients=gradients))
    if exact:
        with tf.control_dependencies(reduced):
            sums = iter(backend.all_reduce([tf.identity(state[i]) for i in exact]))
        others = iter(total.sums.state)
        state = [next(sums if i in exact else others) for i in range(len(state))]
        total = total._replace(sums=total.sums._replace(state=state))
    if backend.tensor is not None:
        total = _by_rank(total, backend.tensor, attachments)
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


def _by_rank(
    total: StepSums, group: Any, attachments: Sequence[Attachment]
) -> StepSums:
    """Where ranks hold a replica together, what each of them contributed.

    The all-reduce sums over replicas; ranks of one replica have different totals.
    """
    chosen = [place for place, a in enumerate(attachments) if a.per_rank]
    tensors = [t for place in chosen for t in total.attached[place]]
    columns = [total.not_finite[:, None], *tensors]
    by_rank = group.by_rank(tf.concat(columns, axis=1))
    pieces = tf.split(by_rank, [c.shape[1] for c in columns], axis=1)
    attached = list(total.attached)
    left = iter(pieces[1:])
    for place in chosen:
        attached[place] = [next(left) for _ in attached[place]]
    return total._replace(not_finite=pieces[0][:, 0], attached=attached)
