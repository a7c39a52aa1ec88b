"""Horovod's collectives, over the ops of ``collective.tensorflow_ops``.

All work in eager mode and inside ``tf.function``. Gradients are Horovod's: it averages
the gradients of ``allgather`` and ``broadcast`` over the ranks, although the derivative
of a sum of losses is their sum, and it sums the gradient of ``reducescatter``, whose
derivative is the average.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import collective
from collective import horovod_variables, tensorflow_ops
from collective import process_set as core
from collective.operations.kinds import Average, Op
from collective.tensorflow import reductions
from collective.tensorflow.compression import Compression, Compressor
from collective.tensorflow.functions import tensor_of
from collective.tensorflow.process_sets import ProcessSet, global_process_set, group_of
from collective.tensorflow.reductions import (
    Reduction,
    chosen_reduction,
    movable,
    restored,
)
from collective.tensorflow.signatures import ordered
from collective.tensorflow_ops import ranks

# A tf.Tensor or tf.IndexedSlices; TensorFlow has no types for mypy.
Tensor = Any


@tf.autograph.experimental.do_not_convert
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Tensor:
    """Reduce a tensor over the ranks; the same bits on every rank.

    Args:
        tensor: A tensor, variable or ``tf.IndexedSlices``, of equal shape and dtype on
            every rank. Rows of slices that several ranks have, or that one rank has
            twice, are combined in the result.
        average: The old way to say ``op=Average`` or ``op=Sum``.
        device_dense, device_sparse: The device of the result; any by default.
        compression: How gradients are compressed on the way.
        op: Average by default; Sum, Adasum, Min, Max or Product.
        prescale_factor: Multiplied into the tensor before the reduction.
        postscale_factor: Multiplied into the result.
        name: The name by which ranks match the call; needed only if threads call.
        process_set: The ranks that take part.
        ignore_name_scope: Not used: names do not depend on scopes here.

    Returns:
        The result, of the shape and dtype of ``tensor``.

    Raises:
        tf.errors.FailedPreconditionError: On every rank, if they do not agree.
        tf.errors.AbortedError: If a rank died or left.
        NotImplementedError: If the core cannot do this reduction.
    """
    return grouped_allreduce(
        [tensor],
        average,
        device_dense,
        device_sparse,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        ignore_name_scope,
        name,
    )[0]


@tf.autograph.experimental.do_not_convert
def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Tensor]:
    """Reduce a list of tensors as one, like ``allreduce``; dtypes may differ.

    Returns:
        The results in order.
    """
    reduction = chosen_reduction(op, average)
    results: list[Tensor] = list(tensors)
    slices = [i for i, t in enumerate(tensors) if isinstance(t, tf.IndexedSlices)]
    dense = [i for i in range(len(results)) if i not in slices]
    with tf.device(device_sparse or None):
        for place in slices:
            results[place] = reductions.sparse_allreduce(
                results[place],
                reduction,
                prescale_factor * postscale_factor,
                process_set,
                name and f"{name} {place}",
            )
    with tf.device(device_dense or None):
        sent, undo = [], []
        for place in dense:
            small, context = compression.compress(tensor_of(results[place]))
            sent.append(reductions.scaled(reductions.reducible(small), prescale_factor))
            undo.append((small.dtype, context))
        if isinstance(reduction, Op):
            size, group = horovod_variables.fusion_bytes(), group_of(process_set)
            reduced = tensorflow_ops.all_reduce(
                sent, reduction, name, group, bucket_bytes=size
            )
        else:
            reduced = reductions.adasum(sent, process_set, name)
        for place, result, (dtype, context) in zip(dense, reduced, undo, strict=True):
            result = tf.cast(reductions.scaled(result, postscale_factor), dtype)
            results[place] = compression.decompress(result, context)
    return results


@tf.autograph.experimental.do_not_convert
def allgather(
    tensor: tf.Tensor,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the tensors of all ranks along the first axis.

    Args:
        tensor: ``[rows, ...]``, equal dtype and shape on every rank but for rows.
        name, ignore_name_scope, process_set: As for ``allreduce``, and so are errors.

    Returns:
        ``[sum of rows, ...]``.
    """
    group = group_of(process_set)
    source = _with_scaled_gradient(tensor_of(tensor), group, operator.truediv)
    gathered = tensorflow_ops.allgather(movable(source), name, group)
    return restored(gathered, source.dtype)


@tf.autograph.experimental.do_not_convert
def grouped_allgather(
    tensors: Sequence[tf.Tensor],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Return ``allgather`` of each tensor of a list."""
    return [
        allgather(t, name and f"{name} {i}", ignore_name_scope, process_set)
        for i, t in enumerate(tensors)
    ]


@tf.autograph.experimental.do_not_convert
def broadcast(
    tensor: tf.Tensor,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Give every rank the root's tensor.

    Args:
        tensor: A tensor of equal shape and dtype on every rank.
        root_rank: The root, counted in the whole job.
        name, ignore_name_scope, process_set: As for ``allreduce``, and so are errors.

    Raises:
        ValueError: If the root is not in the set.
    """
    group = group_of(process_set)
    # The core checks a traced call among all ranks when it runs: there may be more
    # ranks by then.
    checked = tf.executing_eagerly() or process_set is not global_process_set
    if checked and root_rank not in process_set.ranks:
        raise ValueError(
            f"root rank {root_rank} is not in {process_set}\n"
            "HINT: the root is counted in the whole job, and must be a member"
        )
    source = _with_scaled_gradient(tensor_of(tensor), group, operator.truediv)
    moving = [movable(source)]
    (received,) = tensorflow_ops.broadcast(moving, root_rank, name, group)
    return restored(received, source.dtype)


@tf.autograph.experimental.do_not_convert
def alltoall(
    tensor: tf.Tensor,
    splits: tf.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Send rows to every rank and receive theirs.

    Args:
        tensor: ``[rows, ...]``, equal dtype and shape on every rank but for rows.
        splits: Rows for each rank, adding up to ``rows``; equal parts by default.
        name, ignore_name_scope, process_set: As for ``allreduce``, and so are errors.

    Returns:
        The received rows in the order of the ranks; with ``splits`` also how many
        came from each (int32).
    """
    source = tensor_of(tensor)
    moved, received = tensorflow_ops.alltoall(
        movable(source), splits, name, group_of(process_set)
    )
    result = restored(moved, source.dtype)
    return result if splits is None else (result, tf.cast(received, tf.int32))


@tf.autograph.experimental.do_not_convert
def reducescatter(
    tensor: tf.Tensor,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: Reduction = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce a tensor over the ranks and give each rank some of its rows.

    Args:
        tensor: ``[rows, ...]``, of equal shape and dtype on every rank.
        device_dense, compression, op, name, process_set, ignore_name_scope,
            prescale_factor, postscale_factor: As for ``allreduce``, and so are errors.

    Returns:
        This rank's rows; equal numbers, with one row more for the first ranks if
        needed.

    Raises:
        NotImplementedError: For Adasum.
    """
    reduction, group = chosen_reduction(op), group_of(process_set)
    if not isinstance(reduction, Op):
        raise NotImplementedError(
            "Adasum needs the whole of all tensors on every rank\n"
            "HINT: use hvd.allreduce(op=hvd.Adasum), or op=hvd.Average"
        )
    with tf.device(device_dense or None):
        small, context = compression.compress(tensor_of(tensor))
        sent = reductions.scaled(reductions.reducible(small), prescale_factor)
        sent = _with_scaled_gradient(sent, group, operator.mul)
        result = tensorflow_ops.reducescatter(sent, reduction, name, group)
        result = tf.cast(reductions.scaled(result, postscale_factor), small.dtype)
        return compression.decompress(result, context)


@ordered(
    "tensors device_dense compression op process_set prescale_factor postscale_factor",
    reducescatter,
)
def grouped_reducescatter(
    tensors: Sequence[tf.Tensor], **options: Any
) -> list[tf.Tensor]:
    """Return ``reducescatter`` of each tensor of a list."""
    return [reducescatter(tensor, **options) for tensor in tensors]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait for every rank of the set.

    Raises:
        CollectiveError: If a rank died, left or called something else.
    """
    collective.barrier(process_set=group_of(process_set))


def join() -> int:
    """Wait until every rank has joined; until then change no result of the others.

    This is for ranks with fewer batches: an average still divides by the number of all
    ranks, as in Horovod. Until then, the other ranks may call ``allreduce`` and
    ``allgather``, and everything made from them: the tape, ``DistributedOptimizer``.
    They may not call Adasum.

    Returns:
        The rank that joined last; if several joined between the same two calls, the
        highest.

    Raises:
        CollectiveError: If a rank died or left, or made no call for too long.
        NotImplementedError: While a function is traced.
    """
    if not tf.executing_eagerly():
        raise NotImplementedError(
            "join() inside a tf.function\nHINT: call it after the last step"
        )
    return collective.join()


def _with_scaled_gradient(
    tensor: tf.Tensor,
    group: core.ProcessSet | None,
    scale: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Return the tensor; scale its gradient by the number of ranks."""
    if not tensor.dtype.is_floating:
        return tensor

    @tf.custom_gradient
    def same(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], Any]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return scale(upstream, tf.cast(ranks.size(group), upstream.dtype))

        return tf.identity(x), gradient

    return same(tensor)
