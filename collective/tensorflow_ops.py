"""Collectives as TensorFlow ops, in eager mode and inside ``tf.function``.

The kernels hand the tensors to the native core and return at once; no thread of
TensorFlow waits for another rank. Inside a ``tf.function`` the ranks may reach the
ops in different orders: the core runs them by name, in the order of the first rank.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from collective import library, tensorflow_rank_info
from collective.buckets import in_buckets
from collective.errors import CollectiveError
from collective.operations.kinds import (
    Average,
    Op,
    algorithm_number,
    op_number,
    transport_number,
)
from collective.operations.kinds import Sum as Sum
from collective.process_set import ProcessSet


@dataclass
class _Trace:
    """A function that was or is being traced.

    Attributes:
        plan: Number under which the core knows the names of its collectives.
        calls: Collectives so far.
        last: The last op of a process set and name.
    """

    plan: int
    calls: int = 0
    last: dict[tuple[int, str], weakref.ref[tf.Operation]] = field(default_factory=dict)


_traces: weakref.WeakKeyDictionary[Any, _Trace] = weakref.WeakKeyDictionary()
# Not from 1: the functions of a saved model still have the numbers of the process
# that saved it.
_plans = itertools.count(random.SystemRandom().randrange(1, 1 << 30))


@functools.cache
def _ops() -> Any:
    """Loads the library of the ops, once.

    Raises:
        CollectiveError: If it was not built or does not load.
    """
    library.load()
    path = library.path().with_name("libcollective_tensorflow.so")
    try:
        return tf.load_op_library(str(path))
    except (tf.errors.OpError, OSError) as error:
        raise CollectiveError(
            f"the TensorFlow ops do not load: {error}",
            hint="install a C++17 compiler, then: pip install -e .",
        ) from error


def all_reduce(
    tensors: Sequence[tf.Tensor],
    op: Op = Sum,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    *,
    algorithm: str = "auto",
    transport_dtype: str | None = None,
    bucket_bytes: int | None = None,
) -> list[tf.Tensor]:
    """Reduces a list of tensors over all ranks as one.

    The gradient of a sum (or mean) is the sum (or mean) of the ranks' gradients.

    Args:
        tensors: Dense, of any shapes and dtypes, the same on every rank.
        op: Sum, Average, Min, Max or Product.
        name: What the ranks know the call by; by default the function that is being
            traced and the number of the call in it. (Not the number of traces: a
            rank with fewer rows traces more often than the others.)
        process_set: The ranks that take part; None for all.
        algorithm: As for ``collective.allreduce``.
        transport_dtype: As for ``collective.allreduce``.
        bucket_bytes: Inside a ``tf.function``, reduces the list in buckets of about
            so many bytes, from its end: the order in which back-propagation makes
            gradients, so that the first buckets leave while it still runs. By
            default all in one: where ranks share their cores with the computation,
            there is little to gain.

    Returns:
        The results in order, the same bits on every rank.

    Raises:
        tf.errors.FailedPreconditionError: On every rank, if they do not agree.
        tf.errors.AbortedError: If a rank died or left.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not tensors:
        return []
    name = _name("all_reduce", name)
    group = _group(process_set)
    results: list[tf.Tensor | None] = [None] * len(tensors)
    buckets = in_buckets(tensors, None if tf.executing_eagerly() else bucket_bytes)
    for number, places in enumerate(buckets):
        reduced = _make(
            "all_reduce",
            [tensors[place] for place in places],
            reduction=op_number(op),
            algorithm=algorithm_number(algorithm),
            transport=transport_number(transport_dtype),
            **_attributes(
                f"{name} bucket {number}" if len(buckets) > 1 else name, group
            ),
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
    """Gives every rank the root's tensors.

    Its gradient is, on the root, the sum of the ranks' gradients, elsewhere zero.

    Args:
        tensors: Dense, of the same shapes and dtypes on every rank.
        root_rank: The root, counted in the whole job.
        name: As for ``all_reduce``.
        process_set: The ranks that take part; None for all.

    Returns:
        The root's tensors, in order.

    Raises:
        tf.errors.OpError: As for ``all_reduce``.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not tensors:
        return []
    root = process_set.ranks.index(root_rank) if process_set else root_rank
    return _make(
        "broadcast",
        tensors,
        root=root,
        **_attributes(_name("broadcast", name), _group(process_set)),
    )


def allgather(
    tensor: tf.Tensor, name: str | None = None, process_set: ProcessSet | None = None
) -> tf.Tensor:
    """Concatenates the tensors of all ranks along the first axis.

    Args:
        tensor: ``[rows, ...]``, equal dtype and shape on every rank but for rows.
        name: As for ``all_reduce``.
        process_set: The ranks that take part; None for all.

    Returns:
        ``[sum of rows, ...]``. Its gradient is this rank's rows of the summed one.

    Raises:
        tf.errors.OpError: As for ``all_reduce``.
    """
    tensor = tf.convert_to_tensor(tensor)
    result = _make(
        "all_gather",
        tensor,
        **_attributes(_name("allgather", name), _group(process_set)),
    )
    return _with_rows(result, tensor)


def reducescatter(
    tensor: tf.Tensor,
    op: Op = Sum,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> tf.Tensor:
    """Reduces a tensor over all ranks and gives each rank some of its rows.

    Args:
        tensor: ``[rows, ...]``, equal shape and dtype on every rank.
        op: Sum, Average, Min, Max or Product.
        name: As for ``all_reduce``.
        process_set: The ranks that take part; None for all.

    Returns:
        This rank's rows, as even as can be, the first ranks having one more.

    Raises:
        tf.errors.OpError: As for ``all_reduce``.
    """
    tensor = tf.convert_to_tensor(tensor)
    result = _make(
        "reduce_scatter",
        tensor,
        reduction=op_number(op),
        **_attributes(_name("reducescatter", name), _group(process_set)),
    )
    return _with_rows(result, tensor)


def alltoall(
    tensor: tf.Tensor,
    splits: tf.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends rows to every rank and receives theirs.

    Args:
        tensor: ``[rows, ...]``, equal dtype and shape on every rank but for rows.
        splits: Rows for each rank, int64, adding up to ``rows``; equal parts by
            default.
        name: As for ``all_reduce``.
        process_set: The ranks that take part; None for all.

    Returns:
        The received rows in the order of the ranks, and how many came from each.

    Raises:
        tf.errors.OpError: As for ``all_reduce``.
    """
    tensor = tf.convert_to_tensor(tensor)
    if splits is None:
        size = tensorflow_rank_info.size(process_set)
        splits = tf.fill(
            [size], tf.shape(tensor, tf.int64)[0] // tf.cast(size, tf.int64)
        )
    result, received = _make(
        "all_to_all",
        tensor,
        tf.cast(splits, tf.int64),
        **_attributes(_name("alltoall", name), _group(process_set)),
    )
    received.set_shape([None])
    return _with_rows(result, tensor), received


def _with_rows(result: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Tells a traced result that only the number of its rows is not known."""
    if not tf.executing_eagerly() and like.shape.rank is not None:
        result.set_shape([None, *like.shape[1:]])
    return result


def _group(process_set: ProcessSet | None) -> int:
    # The core refuses a rank outside of the set when the op runs.
    return process_set.number if process_set else 0


def _name(kind: str, name: str | None) -> str:
    """What the ranks know the call by; nothing where order tells."""
    if tf.executing_eagerly():
        return name or ""
    function, trace = _trace()
    trace.calls += 1
    return name or f"{kind} {trace.calls} of {function}"


def _trace() -> tuple[str, _Trace]:
    """The outermost function that is being traced, and its name."""
    graph = tf.compat.v1.get_default_graph()
    # Out of branches and loops, whose names differ between ranks. What is around the
    # function itself is a plain graph.
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    if graph not in _traces:
        _traces[graph] = _Trace(next(_plans))
    # A graph of TensorFlow 1 has no name.
    return getattr(graph, "name", "graph"), _traces[graph]


def _attributes(name: str, group: int) -> dict[str, Any]:
    """Of an op; while a function is traced, tells the core that it has this op."""
    eager = tf.executing_eagerly()
    plan = 0
    if not eager:
        function, trace = _trace()
        plan = trace.plan
        # Threads may run functions of one name side by side.
        function += f" in {threading.current_thread().name}"
        library.load().collective_plan(plan, group, function.encode(), name.encode())
    return {
        "process_set": group,
        "in_order": int(eager),
        "plan": plan,
        "tensor_name": name,
    }


def _make(kind: str, *inputs: Any, **attributes: Any) -> Any:
    """Makes an op; its results.

    Inside a ``tf.function``, TensorFlow runs ops with side effects one after the other,
    in the order of the program. These need no order: each begins when its inputs are
    there, beside others and beside what is still computed. Only one of the same name as
    another before it waits for that: ranks would take one for the other.
    """
    op = getattr(_ops(), f"collective_{kind}")
    if tf.executing_eagerly():
        return op(*inputs, **attributes)
    _, trace = _trace()
    key = attributes.get("process_set", 0), attributes["tensor_name"]
    graph = tf.compat.v1.get_default_graph()
    before = trace.last[key]() if key in trace.last else None
    same = [before] if before is not None and before.graph is graph else []
    with tf.control_dependencies(same):
        results = op(*inputs, **attributes)
    made = tf.nest.flatten(results)[0].op
    trace.last[key] = weakref.ref(made)  # not the graph's owner
    manager = getattr(graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(made)
    return results


def _gradient_attributes(op: tf.Operation) -> dict[str, Any]:
    name = op.get_attr("tensor_name").decode()
    return _attributes(
        f"gradient of {name}" if name else "", op.get_attr("process_set")
    )


@tf.RegisterGradient("CollectiveAllReduce")
def _all_reduce_gradient(op: tf.Operation, *gradients: tf.Tensor) -> list[tf.Tensor]:
    reduction = op.get_attr("reduction")
    if reduction not in (int(Sum), int(Average)):
        raise CollectiveError(
            f"{Op(reduction).name} over ranks has no gradient",
            hint="differentiate through Sum or Average only",
        )
    return _make(
        "all_reduce",
        list(gradients),
        reduction=reduction,
        algorithm=op.get_attr("algorithm"),
        transport=op.get_attr("transport"),
        **_gradient_attributes(op),
    )


@tf.RegisterGradient("CollectiveBroadcast")
def _broadcast_gradient(op: tf.Operation, *gradients: tf.Tensor) -> list[tf.Tensor]:
    attributes = _gradient_attributes(op)
    sums = _make("all_reduce", list(gradients), **attributes)
    # Within a set the root is counted among its members, as it is in the op.
    is_root = tf.equal(_place(op).rank, op.get_attr("root"))
    # The sums are used on every rank: a graph leaves out an op whose result is not,
    # and the others would wait for it.
    return [tf.where(is_root, total, tf.zeros_like(total)) for total in sums]


@tf.RegisterGradient("CollectiveAllGather")
def _allgather_gradient(op: tf.Operation, gradient: tf.Tensor) -> tf.Tensor:
    attributes = _gradient_attributes(op)
    name = attributes.pop("tensor_name")
    rows = tf.shape(op.inputs[0], tf.int64)[0]
    me = tf.cast(_place(op).rank, tf.int64)
    # With the ranks: those that have joined give none.
    everyone = _make(
        "all_gather",
        tf.stack([[me, rows]]),
        tensor_name=name and f"rows of {name}",
        **attributes,
    )
    (total,) = _make("all_reduce", [gradient], tensor_name=name, **attributes)
    start = tf.reduce_sum(tf.where(everyone[:, 0] < me, everyone[:, 1], 0))
    return total[start : start + rows]


@tf.RegisterGradient("CollectiveReduceScatter")
def _reducescatter_gradient(op: tf.Operation, gradient: tf.Tensor) -> tf.Tensor:
    reduction = op.get_attr("reduction")
    if reduction not in (int(Sum), int(Average)):
        raise CollectiveError(
            f"{Op(reduction).name} over ranks has no gradient",
            hint="differentiate through Sum or Average only",
        )
    whole = _make("all_gather", gradient, **_gradient_attributes(op))
    if reduction == int(Average):
        whole /= tf.cast(_place(op).size, whole.dtype)
    return whole


@tf.RegisterGradient("CollectiveAllToAll")
def _alltoall_gradient(
    op: tf.Operation, gradient: tf.Tensor, received: tf.Tensor
) -> list[tf.Tensor | None]:
    del received  # the numbers of rows have no gradient
    result, _ = _make("all_to_all", gradient, op.outputs[1], **_gradient_attributes(op))
    return [result, None]


def _place(op: tf.Operation) -> tensorflow_rank_info.RankInfo:
    """This process' place among the ranks of an op, when the graph runs."""
    return tensorflow_rank_info.rank_info(op.get_attr("process_set"))
