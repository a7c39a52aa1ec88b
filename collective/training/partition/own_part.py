"""The part of a replica, as rules ask for it: its rows, and what follows from them.

``OwnPart`` is what a rule is given to make the part of one replica. Mostly the rows are
those of the batch, and it is the emission. Half of the batch, every second row, or all rows
but the first are rows of another number: ``OtherRows`` has the part of each replica of
them, and the same rules hold for them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from collective.training.partition.compiled import copied
from collective.training.partition.graph import Node, Sizes
from collective.training.partition.known import Known, on_host
from collective.training.partition.layouts import (
    Layout,
    Shape,
    Sharded,
    SomeRows,
)
from collective.training.partition.shares import Share
from collective.training.partition.sizes import AnySize, Size, Symbol, symbolic

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission


class OwnPart:
    """The rows of each replica of this process, of which one is made now.

    Args:
        share: The rows, and those of each replica that this process plays.
        rows: The size that stands for all rows.
        known: Makes constants and sizes.
        some: The rows, if they are not the rows of the batch.
    """

    def __init__(
        self,
        share: Share,
        rows: AnySize,
        known: Known,
        some: SomeRows | None = None,
    ):
        self.share, self.rows, self.some = share, rows, some
        self.known, self._replica = known, 0
        count = range(len(share.own))
        self._own = [Symbol(f"own rows {i}") for i in count]
        self._first = [Symbol(f"first row {i}") for i in count]

    def number_of_replica(self, symbol: Symbol) -> tf.Tensor | None:
        """Return rows or first row of a replica, if the symbol stands for these: int64 scalar."""
        for symbols, numbers in (
            (self._own, self.share.own),
            (self._first, self.share.first),
        ):
            if symbol in symbols:
                return numbers[symbols.index(symbol)]
        return None

    @property
    def replica(self) -> int:
        """Return the number of the replica, among those of this process."""
        return self._replica

    @property
    def own(self) -> tf.Tensor:
        """int64 scalar: rows of the replica that is made now."""
        return self.share.own[self.replica]

    @property
    def own_rows(self) -> AnySize:
        """Return the number of rows as a size, to compute other sizes with."""
        return self.rows_of(self.replica)

    @property
    def first_row(self) -> AnySize:
        """Return the index of its first row in the batch."""
        if self.share.places is not None:
            return self.share.places[self.replica][0]
        return symbolic(self._first[self.replica])

    def rows_of(self, replica: int) -> AnySize:
        """Return the number of rows of a replica as a size."""
        if self.share.places is not None:
            return self.share.places[replica][1]
        return symbolic(self._own[replica])

    def number(self, size: AnySize) -> tf.Tensor:
        """Return what a size is in this step: int64 scalar."""
        return self.known.number(size)

    def vector(self, sizes: Sequence[AnySize], dtype: tf.DType = tf.int64) -> tf.Tensor:
        """Return what several sizes are in this step."""
        return self.known.vector(sizes, dtype)

    def scalar(self, size: AnySize, dtype: tf.DType) -> tf.Tensor:
        """Return what a size is in this step, of any dtype."""
        return self.known.scalar(size, dtype)

    def once(self, key: Hashable, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Return what was made for this replica under this key, and make it the first time."""
        return self.known.once((self.replica, self.some, key), make)

    def knows(self, sizes: Sizes) -> bool:
        """Return whether a size, or each of several, follows from the rows alone."""
        if isinstance(sizes, (tuple, list)):
            return all(map(self.knows, sizes))
        return isinstance(sizes, int) or (isinstance(sizes, Size) and sizes.is_of_rows)

    def local_size(self, layout: Sharded, size: tf.Tensor | None = None) -> tf.Tensor:
        """Return how many places of a sharded axis this replica has: int64 scalar.

        Args:
            size: The number of places of all replicas, if the layout does not have it.
        """
        if size is None or self.knows(layout.per_row):
            return self.number(self.own_rows * layout.per_row)
        with on_host():
            rows = tf.maximum(self.share.total, 1)  # other rows may be none
            return tf.cast(size, tf.int64) // rows * self.own

    def local_shape(
        self, sizes: tf.Tensor, layout: Layout, shape: Shape = None
    ) -> tf.Tensor:
        """Return the shape of this replica's part of a tensor whose whole shape is ``sizes``.

        Args:
            shape: The same, as far as it is known beforehand.
        """
        if not isinstance(layout, Sharded):
            return sizes
        axis = layout.axis
        if shape is not None and self.knows(layout.per_row):
            parts = list(shape)
            parts[axis] = self.own_rows * layout.per_row
            if self.knows(parts):
                return self.vector(parts, sizes.dtype)
        with on_host():
            local = tf.cast(self.local_size(layout, sizes[axis]), sizes.dtype)
            return tf.concat([sizes[:axis], local[None], sizes[axis + 1 :]], 0)

    def copy(
        self, node: Node, inputs: Sequence[tf.Tensor], **attributes: Any
    ) -> list[tf.Tensor]:
        """Return the outputs of the node's operation on other inputs."""
        return list(copied(node, inputs, attributes).outputs)


class OtherRows(OwnPart):
    """The part of each replica of rows that are not those of the batch.

    Args:
        emission: What the batch has; everything else is asked of it.
        some: The rows.
    """

    def __init__(self, emission: Emission, some: SomeRows):
        self._emission = emission
        number: Callable[[AnySize], tf.Tensor] = emission.number
        with emission.known.outside(is_size=True):
            share = _shared(emission.share, some, number)
        super().__init__(share, some.count, emission.known, some)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._emission, name)

    @property
    def replica(self) -> int:
        """Return the number of the replica, among those of this process."""
        return int(self._emission.replica)


def _shared(
    of_batch: Share, some: SomeRows, number: Callable[[AnySize], tf.Tensor]
) -> Share:
    """Share out other rows: a replica has those before its end that none before it has."""
    count = number(some.count)

    def before(row: tf.Tensor) -> tf.Tensor:
        """Return how many of them are before a row of the batch."""
        if some.begin is None:
            return row * count // of_batch.total
        places = row * number(some.per_row) - number(some.begin)
        return tf.clip_by_value((places + some.step - 1) // some.step, 0, count)

    ends = [
        (before(first), before(first + own))
        for first, own in zip(of_batch.first, of_batch.own, strict=True)
    ]
    replicas = [
        (first, last - first, is_lead)
        for (first, last), is_lead in zip(ends, of_batch.is_lead, strict=True)
    ]
    return Share.of(count, replicas)
