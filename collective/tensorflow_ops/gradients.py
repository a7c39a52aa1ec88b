"""The gradients of the ops: they are collectives, too."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.errors import CollectiveError
from collective.operations.kinds import Average, Op, Sum
from collective.tensorflow_ops import naming, ranks


def _identity(op: tf.Operation, kind: str) -> dict[str, Any]:
    """Return the identity of an op's gradient: attributes and ticket."""
    name = naming.given_name(op)
    name = naming.name_of(f"gradient of {kind}", name and f"gradient of {name}")
    identity = naming.attributes(name, op.get_attr("process_set"))
    ticket = op.outputs[-1]
    # An op that ran in eager mode has no ticket.
    if not tf.executing_eagerly() and hasattr(ticket, "graph"):
        identity["ticket"] = ticket
    return identity


def _refuse_unless_linear(op: tf.Operation) -> None:
    reduction = op.get_attr("reduction")
    if reduction not in (int(Sum), int(Average)):
        raise CollectiveError(
            f"{Op(reduction).name} over ranks has no gradient",
            hint="differentiate through Sum or Average only",
        )


@tf.RegisterGradient("CollectiveAllReduce")
def _all_reduce_gradient(op: tf.Operation, *gradients: tf.Tensor) -> list[tf.Tensor]:
    _refuse_unless_linear(op)
    results = _reduced(
        op,
        gradients,
        reduction=op.get_attr("reduction"),
        algorithm=op.get_attr("algorithm"),
        transport=op.get_attr("transport"),
        **_identity(op, "all_reduce"),
    )
    return [*results, None]


@tf.RegisterGradient("CollectiveBroadcast")
def _broadcast_gradient(op: tf.Operation, *gradients: tf.Tensor) -> list[tf.Tensor]:
    sums = _reduced(op, gradients, **_identity(op, "broadcast"))
    # Within a set the root is counted among its members, as it is in the op.
    is_root = tf.equal(_rank_info(op).rank, op.get_attr("root"))
    # Every rank uses the sums: a graph prunes an op whose result is not used, and then
    # the other ranks would wait for it.
    kept = [
        None if total is None else tf.where(is_root, total, tf.zeros_like(total))
        for total in sums
    ]
    return [*kept, None]


def _reduced(
    op: tf.Operation, gradients: tuple[tf.Tensor, ...], **attributes: Any
) -> list[tf.Tensor | None]:
    """Reduce the gradients of a list; None for the tensors without one."""
    gradients = gradients[:-1]  # the ticket has no gradient
    there = [i for i, gradient in enumerate(gradients) if gradient is not None]
    results: list[tf.Tensor | None] = [None] * len(gradients)
    reduced = naming.make_op("all_reduce", [gradients[i] for i in there], **attributes)
    for place, result in zip(there, reduced, strict=True):
        results[place] = result
    return results


@tf.RegisterGradient("CollectiveAllGather")
def _allgather_gradient(
    op: tf.Operation, gradient: tf.Tensor, ticket: None
) -> list[tf.Tensor | None]:
    attributes = _identity(op, "allgather")
    name = attributes.pop("tensor_name")
    rows = tf.shape(op.inputs[0], tf.int64)[0]
    me = tf.cast(_rank_info(op).rank, tf.int64)
    # Gathered with the ranks: ranks that have joined contribute none.
    everyone = naming.make_op(
        "all_gather",
        tf.stack([[me, rows]]),
        tensor_name=name and f"rows of {name}",
        **attributes,
    )
    (total,) = naming.make_op("all_reduce", [gradient], tensor_name=name, **attributes)
    start = tf.reduce_sum(tf.where(everyone[:, 0] < me, everyone[:, 1], 0))
    return [total[start : start + rows], None]


@tf.RegisterGradient("CollectiveReduceScatter")
def _reducescatter_gradient(
    op: tf.Operation, gradient: tf.Tensor, ticket: None
) -> list[tf.Tensor | None]:
    _refuse_unless_linear(op)
    whole = naming.make_op("all_gather", gradient, **_identity(op, "reducescatter"))
    if op.get_attr("reduction") == int(Average):
        whole /= tf.cast(_rank_info(op).size, whole.dtype)
    return [whole, None]


@tf.RegisterGradient("CollectiveAllToAll")
def _alltoall_gradient(
    op: tf.Operation, gradient: tf.Tensor, received: None, ticket: None
) -> list[tf.Tensor | None]:
    identity = _identity(op, "alltoall")
    result, _ = naming.make_op("all_to_all", gradient, op.outputs[1], **identity)
    return [result, None, None]


def _rank_info(op: tf.Operation) -> ranks.RankInfo:
    """Return this process' place among the ranks of an op, when the graph runs."""
    return ranks.rank_info(op.get_attr("process_set"))
