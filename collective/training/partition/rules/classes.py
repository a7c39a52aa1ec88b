"""Classes that are cut over a model axis: softmax, cross entropy, the largest of them.

Such an operation is made of several, with exchanges between them: by the maximum over the
replicas, a sum over them, and the own label, which one of them has.

Source: M. Shoeybi et al., Megatron-LM, 2019 (its parallel cross entropy).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import tensorflow as tf

from collective.training.partition.graph import Node
from collective.training.partition.layouts import WHOLE, Layout, Sharded
from collective.training.partition.plans import AXIS_RULES, Plan, Rows, rule, summed
from collective.training.partition.rules.handles import own_numbers
from collective.training.partition.shares import pieces_of
from collective.training.partition.values import axis_in

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission

Parts = Sequence[tf.Tensor]
Make: TypeAlias = "Callable[[Emission, Parts, Sequence[Parts]], list[list[tf.Tensor]]]"


def _of_last(node: Node, layouts: Sequence[Layout], place: int = 0) -> Sharded | None:
    """Return how the last axis of an operand is cut, in one block; None if it is not."""
    layout, rank = summed(layouts)[place], node.inputs[place].rank
    if not isinstance(layout, Sharded) or rank is None or layout.axis != rank - 1:
        return None
    return layout if len(layout.blocks) == 1 else None


def jointly(
    wanted: Sequence[Layout | None], outputs: Sequence[Layout], make: Make
) -> Plan:
    """Return the plan of an operation with exchanges in its middle.

    Args:
        make: From the parts of operand 0 of each replica of this process, and those of
            all operands, the tensors of each output.
    """

    def joint(
        emission: Emission, inputs: list[list[tf.Tensor]]
    ) -> tuple[list[list[tf.Tensor]], tf.Operation]:
        place = next(i for i, lay in enumerate(wanted) if isinstance(lay, Sharded))
        made = make(emission, inputs[place], inputs)
        flat = [tensor for tensors in made for tensor in tensors]
        with tf.control_dependencies(flat):
            return made, tf.no_op()

    return Plan(wanted, outputs, joint=joint)


def _shifted(emission: Emission, parts: Parts) -> tuple[Parts, tf.Tensor]:
    """Return numbers less the maximum over the last axis, not in 16 bits; and the maximum."""
    wide = [tf.cast(t, tf.float32) if t.dtype.size < 4 else t for t in parts]
    own = [tf.reduce_max(t, -1, keepdims=True) for t in wide]
    (peak,) = emission.pending.at_once("max", [own])
    return [t - peak for t in wide], peak


@rule("Softmax", "LogSoftmax", table=AXIS_RULES)
def softmax(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Normalize by the maximum and the sum over the replicas."""
    layout, dtype = _of_last(node, layouts), node.outputs[0].dtype
    if layout is None:
        return None

    def make(
        emission: Emission, parts: Parts, inputs: Sequence[Parts]
    ) -> list[list[tf.Tensor]]:
        shifted, _ = _shifted(emission, parts)
        exps = [tf.exp(t) for t in shifted]
        own = [tf.reduce_sum(t, -1, keepdims=True) for t in exps]
        (total,) = emission.pending.at_once("sum", [own])
        if node.type == "Softmax":
            return [[tf.cast(e / total, dtype) for e in exps]]
        return [[tf.cast(t - tf.math.log(total), dtype) for t in shifted]]

    return jointly([layout], [layout], make)


@rule("SparseSoftmaxCrossEntropyWithLogits", table=AXIS_RULES)
def sparse_cross_entropy(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Compute the loss by the maximum, the sum, and the number of the own label."""
    layout, dtype = _of_last(node, layouts), node.outputs[0].dtype
    if layout is None:
        return None

    def make(
        emission: Emission, parts: Parts, inputs: Sequence[Parts]
    ) -> list[list[tf.Tensor]]:
        shifted, _ = _shifted(emission, parts)
        (labels,) = inputs[1]
        exps = [tf.exp(t) for t in shifted]
        mine, marks = [], []
        for replica in emission.each():
            numbers, is_mine = own_numbers(emission, layout, labels)
            picked = tf.gather(shifted[replica], numbers, axis=-1, batch_dims=1)
            mine.append(tf.where(is_mine, picked, tf.zeros_like(picked)))
            places = tf.where(is_mine, numbers, -tf.ones_like(numbers))
            ((_, count),) = pieces_of(emission, layout)
            depth = emission.scalar(count, tf.int32)
            marks.append(tf.one_hot(places, depth, dtype=picked.dtype))
        own = [tf.reduce_sum(t, -1) for t in exps]
        total, label = emission.pending.at_once("sum", [own, mine])
        loss = tf.cast(tf.math.log(total) - label, dtype)
        slopes = [
            tf.cast(e / total[:, None] - mark, dtype)
            for e, mark in zip(exps, marks, strict=True)
        ]
        return [[loss], slopes]

    return jointly([layout, WHOLE], [WHOLE, layout], make)


@rule("SoftmaxCrossEntropyWithLogits", table=AXIS_RULES)
def cross_entropy(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Compute the loss by the maximum and three sums."""
    layout, dtype = _of_last(node, layouts), node.outputs[0].dtype
    if layout is None:
        layout = _of_last(node, layouts, 1)
    if layout is None or node.inputs[0].shape != node.inputs[1].shape:
        return None

    def make(
        emission: Emission, parts: Parts, inputs: Sequence[Parts]
    ) -> list[list[tf.Tensor]]:
        shifted, _ = _shifted(emission, parts)
        labels = [tf.cast(t, shifted[0].dtype) for t in inputs[1]]
        exps = [tf.exp(t) for t in shifted]
        pairs = list(zip(labels, shifted, strict=True))
        total, weight, aligned = emission.pending.at_once(
            "sum",
            [
                [tf.reduce_sum(t, -1) for t in exps],
                [tf.reduce_sum(t, -1) for t in labels],
                [tf.reduce_sum(a * b, -1) for a, b in pairs],
            ],
        )
        loss = tf.cast(tf.math.log(total) * weight - aligned, dtype)
        slopes = [
            tf.cast(e / total[:, None] - label, dtype)
            for e, label in zip(exps, labels, strict=True)
        ]
        return [[loss], slopes]

    return jointly([layout, layout], [WHOLE, layout], make)


@rule("TopK", "TopKV2", table=AXIS_RULES)
def top(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Take the largest of the largest of each replica."""
    layout, rank = _of_last(node, layouts), node.inputs[0].rank
    if layout is None or rank is None or not isinstance(layout.per_row, int):
        return None
    if node.type == "TopK":
        most: Any = node.attr("k")
    else:
        most = node.inputs[1].const
    if most is None:
        return None
    own = min(int(most), layout.per_row)

    def make(
        emission: Emission, parts: Parts, inputs: Sequence[Parts]
    ) -> list[list[tf.Tensor]]:
        values, numbers = [], []
        for replica in emission.each():
            ((first, _),) = pieces_of(emission, layout)
            found = tf.math.top_k(parts[replica], own)
            values.append(found.values)
            numbers.append(found.indices + emission.scalar(first, tf.int32))
        spread = Sharded(rank - 1, (own,))
        pending = emission.pending
        candidates = pending.gathered_at_once(emission, values, spread)
        places = pending.gathered_at_once(emission, numbers, spread)
        best = tf.math.top_k(candidates, int(most))
        chosen = tf.gather(places, best.indices, axis=-1, batch_dims=rank - 1)
        return [[best.values], [tf.cast(chosen, node.outputs[1].dtype)]]

    rest = [WHOLE] * (len(layouts) - 1)
    return jointly([layout, *rest], [WHOLE, WHOLE], make)


@rule("ArgMax", "ArgMin", table=AXIS_RULES)
def arg_max(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Find the place of the largest among the largest of each replica."""
    layout, rank = summed(layouts)[0], node.inputs[0].rank
    axis = axis_in(node.inputs[1], rank)
    if not isinstance(layout, Sharded) or rank is None or axis != layout.axis:
        return None
    if len(layout.blocks) > 1:
        return None
    find, reduce = (
        (tf.argmax, tf.reduce_max)
        if node.type == "ArgMax"
        else (tf.argmin, tf.reduce_min)
    )

    def make(
        emission: Emission, parts: Parts, inputs: Sequence[Parts]
    ) -> list[list[tf.Tensor]]:
        values, numbers = [], []
        for replica in emission.each():
            ((first, _),) = pieces_of(emission, layout)
            place = find(parts[replica], axis) + emission.scalar(first, tf.int64)
            numbers.append(place[..., None])
            values.append(reduce(parts[replica], axis)[..., None])
        spread = Sharded(rank - 1, (1,))
        pending = emission.pending
        candidates = pending.gathered_at_once(emission, values, spread)
        places = pending.gathered_at_once(emission, numbers, spread)
        best = find(candidates, -1)
        chosen = tf.gather(places, best, axis=-1, batch_dims=rank - 1)
        return [[tf.cast(chosen, node.outputs[0].dtype)]]

    return jointly([layout, WHOLE], [WHOLE], make)


@rule("InTopK", "InTopKV2", table=AXIS_RULES)
def in_top(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Return whether fewer than so many numbers are larger than that of the own label."""
    layout = _of_last(node, layouts)
    most = node.attr("k") if node.type == "InTopK" else node.inputs[2].const
    if layout is None or most is None:
        return None

    def make(
        emission: Emission, parts: Parts, inputs: Sequence[Parts]
    ) -> list[list[tf.Tensor]]:
        (labels,) = inputs[1]
        mine, strange = [], []
        for replica in emission.each():
            numbers, is_mine = own_numbers(emission, layout, labels)
            picked = tf.gather(parts[replica], numbers, axis=-1, batch_dims=1)
            mine.append(tf.where(is_mine, picked, tf.zeros_like(picked)))
            finite = tf.math.is_finite(parts[replica])
            strange.append(tf.reduce_sum(tf.cast(~finite, tf.float32), -1))
        label, others = emission.pending.at_once("sum", [mine, strange])
        above = [
            tf.reduce_sum(tf.cast(part > label[:, None], tf.float32), -1)
            for part in parts
        ]
        (count,) = emission.pending.at_once("sum", [above])
        return [[(count < float(most)) & tf.equal(others, 0)]]

    rest = [WHOLE] * (len(layouts) - 1)
    return jointly([layout, *rest], [WHOLE], make)
