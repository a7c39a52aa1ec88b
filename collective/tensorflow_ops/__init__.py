"""Collectives as TensorFlow ops, in eager mode and inside ``tf.function``.

The kernels pass the tensors to the native core and return at once; no thread of
TensorFlow waits for another rank. Inside a ``tf.function`` ranks may reach the ops in
different orders: the core matches them by name and runs them in the order of the first
rank. Begin with ``naming.py``: it defines the name of a collective, and which
collectives TensorFlow runs in the order of the program. ``gradients.py`` has the
gradients, ``library.py`` the shared library and all imports from inside TensorFlow,
except the one in ``converted_source.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from collective.buckets import in_buckets
from collective.operations.kinds import (
    Average,
    Op,
    algorithm_number,
    op_number,
    transport_number,
)
from collective.process_set import ProcessSet
from collective.tensorflow_ops import gradients as gradients
from collective.tensorflow_ops import ranks
from collective.tensorflow_ops.converted_source import keep_in_memory
from collective.tensorflow_ops.naming import attributes as _attributes
from collective.tensorflow_ops.naming import make_op as _make
from collective.tensorflow_ops.naming import name_of as _name

keep_in_memory()


def all_reduce(
    tensors: Sequence[tf.Tensor],
    op: Op = Average,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    *,
    algorithm: str = "auto",
    transport_dtype: str | None = None,
    bucket_bytes: int | None = None,
) -> list[tf.Tensor]:
    """Reduce a list of tensors over all ranks as one.

    The gradient of a sum (or mean) is the sum (or mean) of the ranks' gradients.

    Args:
        tensors: Dense tensors of any shapes and dtypes, the same on every rank.
        op: Sum, Average, Min, Max or Product.
        name: The name by which ranks match the call; by default the innermost function
            that is being traced and the number of the call in it. (The number of traces
            is not part of it: a rank with fewer rows traces more often than the
            others.)
        process_set: The ranks that take part; None for all.
        algorithm: As for ``collective.allreduce``.
        transport_dtype: As for ``collective.allreduce``.
        bucket_bytes: Inside a ``tf.function``, reduces the list in buckets of about so
            many bytes, from its end. Back-propagation makes gradients in that order, so
            the first buckets leave while it still runs. By default one bucket: if ranks
            share their cores with the computation, buckets gain little.

    Returns:
        The results in order, the same bits on every rank.

    Raises:
        tf.errors.FailedPreconditionError: On every rank, if the ranks' calls differ.
        tf.errors.AbortedError: If a rank died or left.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not tensors:
        return []
    name = _name("all_reduce", name)
    group = process_set.number if process_set else 0
    results: list[tf.Tensor | None] = [None] * len(tensors)
    buckets = in_buckets(tensors, None if tf.executing_eagerly() else bucket_bytes)
    for number, places in enumerate(buckets):
        part = f"{name} bucket {number}" if len(buckets) > 1 else name
        reduced = _make(
            "all_reduce",
            [tensors[place] for place in places],
            reduction=op_number(op),
            algorithm=algorithm_number(algorithm),
            transport=transport_number(transport_dtype),
            **_attributes(part, group),
        )
        for place, result in zip(places, reduced, strict=True):
            results[place] = result
    return results


def broadcast(
    tensors: Sequence[tf.Tensor],
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> list[tf.Tensor]:
    """Give every rank the root's tensors.

    Its gradient is the sum of the ranks' gradients on the root, and zero elsewhere.

    Args:
        tensors: Dense, of the same shapes and dtypes on every rank.
        root_rank: The root, counted in the whole job.
        name, process_set: As for ``all_reduce``, as are the errors.

    Returns:
        The root's tensors, in order.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not tensors:
        return []
    root = process_set.ranks.index(root_rank) if process_set else root_rank
    identity = _identity("broadcast", name, process_set)
    return _make("broadcast", tensors, root=root, **identity)


def allgather(
    tensor: tf.Tensor, name: str | None = None, process_set: ProcessSet | None = None
) -> tf.Tensor:
    """Concatenate the tensors of all ranks along the first axis.

    Args:
        tensor: ``[rows, ...]``, equal dtype and shape on every rank but for rows.
        name, process_set: As for ``all_reduce``, as are the errors.

    Returns:
        ``[sum of rows, ...]``. Its gradient is this rank's rows of the summed gradient.
    """
    tensor = tf.convert_to_tensor(tensor)
    identity = _identity("allgather", name, process_set)
    return _with_rows(_make("all_gather", tensor, **identity), tensor)


def reducescatter(
    tensor: tf.Tensor,
    op: Op = Average,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> tf.Tensor:
    """Reduce a tensor over all ranks and give each rank some of its rows.

    Args:
        tensor: ``[rows, ...]``, equal shape and dtype on every rank.
        op, name, process_set: As for ``all_reduce``, as are the errors.

    Returns:
        This rank's rows; equal numbers, with one row more for the first ranks if
        needed.
    """
    tensor = tf.convert_to_tensor(tensor)
    identity = _identity("reducescatter", name, process_set)
    result = _make("reduce_scatter", tensor, reduction=op_number(op), **identity)
    return _with_rows(result, tensor)


def alltoall(
    tensor: tf.Tensor,
    splits: tf.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Send rows to every rank and receive theirs.

    Args:
        tensor: ``[rows, ...]``, equal dtype and shape on every rank but for rows.
        splits: Rows for each rank, int64, that add up to ``rows``; equally many by
            default.
        name, process_set: As for ``all_reduce``, as are the errors.

    Returns:
        The received rows in the order of the ranks, and how many came from each.
    """
    tensor = tf.convert_to_tensor(tensor)
    if splits is None:
        size = tf.cast(ranks.size(process_set), tf.int64)
        splits = tf.fill([size], tf.shape(tensor, tf.int64)[0] // size)
    identity = _identity("alltoall", name, process_set)
    result, received = _make(
        "all_to_all", tensor, tf.cast(splits, tf.int64), **identity
    )
    received.set_shape([None])
    return _with_rows(result, tensor), received


def _identity(
    kind: str, name: str | None, process_set: ProcessSet | None
) -> dict[str, object]:
    # The core refuses a rank outside of the set when the op runs.
    return _attributes(_name(kind, name), process_set.number if process_set else 0)


def _with_rows(result: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Set the shape of a traced result, in which only the number of rows is unknown."""
    if not tf.executing_eagerly() and like.shape.rank is not None:
        result.set_shape([None, *like.shape[1:]])
    return result
