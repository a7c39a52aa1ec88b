"""The rows of a step that each replica of a process has; slices and gathers by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.partition.graph import Value
from collective.training.partition.known import on_host
from collective.training.partition.layouts import OWNED, Layout, Sharded
from collective.training.partition.sizes import AnySize, Size

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission

_FIELDS = 3  # of each replica in a vector


class Share:
    """Which rows of the batch the replicas of this process have; known in each step.

    Args:
        vector: int64: the rows of the batch; then for each replica its first row, its
            rows, and whether it is the first replica of the job.
        count: The number of replicas.
        places: The first row and the rows of each replica, if these are numbers.
    """

    def __init__(
        self,
        vector: tf.Tensor,
        count: int,
        places: Sequence[tuple[int, int]] | None = None,
    ):
        self.vector, self.places = vector, places
        with on_host():
            parts = tf.unstack(vector, num=1 + _FIELDS * count)
            self.is_lead = [tf.cast(part, tf.bool) for part in parts[3::_FIELDS]]
        self.total = parts[0]
        self.first = parts[1::_FIELDS]
        self.own = parts[2::_FIELDS]

    @classmethod
    def of(
        cls,
        total: tf.Tensor,
        replicas: Sequence[tuple[tf.Tensor, tf.Tensor, tf.Tensor]],
    ) -> Share:
        """Make a share from the rows of the batch and the fields of each replica."""
        fields = [total, *(field for replica in replicas for field in replica)]
        with on_host():
            vector = tf.stack([tf.cast(field, tf.int64) for field in fields])
        return cls(vector, len(replicas))

    @classmethod
    def of_places(cls, total: int, places: Sequence[int]) -> Share:
        """Make a share of the places of a model axis: each replica has one of them."""
        fields = [total, *(field for i in places for field in (i, 1, int(not i)))]
        with on_host():
            vector = tf.constant(fields, tf.int64)
        return cls(vector, len(places), [(i, 1) for i in places])

    def within(self, vector: tf.Tensor) -> Share:
        """Return this share in another graph, to which the vector was passed."""
        return Share(vector, len(self.own), self.places)


def pieces_of(emission: Emission, layout: Sharded) -> list[tuple[AnySize, AnySize]]:
    """Return for each block where this replica's part begins, and its length."""
    before: AnySize = 0
    found = []
    for block in layout.blocks:
        begin = before + emission.first_row * block
        found.append((begin, emission.own_rows * block))
        before = before + emission.rows * block
    return found


def sliced(emission: Emission, tensor: tf.Tensor, layout: Sharded) -> tf.Tensor:
    """Return this replica's part of a whole tensor."""
    rank, axis = tensor.shape.rank, layout.axis
    parts = []
    for begin, count in pieces_of(emission, layout):
        begins: list[AnySize] = [0] * rank
        counts: list[AnySize] = [-1] * rank
        begins[axis], counts[axis] = begin, count
        parts.append(tf.slice(tensor, emission.vector(begins), emission.vector(counts)))
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis)


def gathered(
    emission: Emission, parts: Sequence[tf.Tensor], layout: Sharded
) -> tf.Tensor:
    """Return the whole tensor, of which each replica of this process has a part."""
    axis, blocks = layout.axis, layout.blocks
    parts = [_to_front(part, axis) for part in parts]
    if len(blocks) == 1:
        whole = emission.exchange.gather(_joined(parts))
    elif len(set(blocks)) == 1:
        # Rows first, then blocks: one message for all blocks.
        count = len(blocks)
        rest = tf.shape(parts[0], tf.int64)[1:]
        turned = (
            [
                _swapped(
                    tf.reshape(part, tf.concat([[count, own * blocks[0]], rest], 0))
                )
                for part, own in zip(parts, emission.share.own, strict=True)
            ]
            if isinstance(blocks[0], int)
            else [
                _swapped(tf.reshape(part, tf.concat([[count, -1], rest], 0)))
                for part in parts
            ]
        )
        whole = _swapped(emission.exchange.gather(_joined(turned)))
        size = tf.shape(whole, tf.int64)[1] * count
        whole = tf.reshape(whole, tf.concat([[size], rest], 0))
    else:
        by_block: list[tf.Tensor] = []
        cuts = [
            [own * emission.number(k) for k in blocks] for own in emission.share.own
        ]
        split = [
            tf.split(part, tf.stack(cut), num=len(blocks))
            for part, cut in zip(parts, cuts, strict=True)
        ]
        for of_block in zip(*split, strict=True):
            with tf.control_dependencies(by_block[-1:]):
                by_block.append(emission.exchange.gather(_joined(list(of_block))))
        whole = tf.concat(by_block, 0)
    return _from_front(whole, axis)


def _joined(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def _swapped(tensor: tf.Tensor) -> tf.Tensor:
    return tf.transpose(tensor, [1, 0, *range(2, tensor.shape.rank)])


def _to_front(tensor: tf.Tensor, axis: int) -> tf.Tensor:
    if not axis:
        return tensor
    rest = [i for i in range(tensor.shape.rank) if i != axis]
    return tf.transpose(tensor, [axis, *rest])


def _from_front(tensor: tf.Tensor, axis: int) -> tf.Tensor:
    if not axis:
        return tensor
    order = list(range(1, tensor.shape.rank))
    order.insert(axis, 0)
    return tf.transpose(tensor, order)


def tell_shape(tensor: tf.Tensor, value: Value, layout: Layout, own: AnySize) -> None:
    """Tell TensorFlow the sizes that are numbers.

    Args:
        own: Rows of the replica whose tensor it is.
    """
    assert value.shape is not None
    if layout == OWNED:
        tensor.set_shape([None])
        return
    sizes: list[int | None] = [
        None if isinstance(size, Size) else size for size in value.shape
    ]
    if isinstance(layout, Sharded):
        size = own * layout.per_row
        sizes[layout.axis] = size if isinstance(size, int) else None
    try:
        tensor.set_shape(sizes)
    except ValueError as error:
        raise ValueError(
            f"the rule of {value.node}: {value} was made with shape {tensor.shape}"
        ) from error
