"""Sums of virtual replicas: piece by piece, along subtrees, and their exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from collective.backends.base import Backend
from collective.training.exchange import join
from collective.training.input.pipeline import Batch
from collective.training.input.plan import share
from collective.training.step import finite
from collective.training.step.accumulation import slice_rows
from collective.training.step.clock import now
from collective.training.step.found import Found
from collective.training.step.inputs import ReplicaRows, StepInputs, process_rows
from collective.training.step.local_sums import MicroBatches
from collective.training.step.parts import ReplicaSums, Span, StepSums
from collective.training.step.reduction import sum_tensors
from collective.training.step.rows import Rows
from collective.training.variables import SMALL
from collective.training.variants.virtual.tree import Piece, cut, sum_subtrees, total
from collective.training.virtual.pieces import VirtualReplicas


@dataclass(frozen=True)
class SubtreeSums:
    """The sums over the subtrees of a replica, for ``TreeExchange``."""

    vectors: Any  # of each subtree
    layout: SumsLayout  # what they hold
    number: tf.Tensor  # int64 scalar, the step's number


class PieceSums:
    """Sums over the pieces of this replica; see ``LocalSums``.

    Args:
        of_piece: The sums of one piece, whose number is ``StepInputs.replica``.
        dtype: All sums travel in it; state that it cannot hold, in float64.
    """

    counts_replicas = True

    def __init__(
        self,
        virtual: VirtualReplicas,
        backend: Backend,
        of_piece: MicroBatches,
        dtype: tf.DType,
    ):
        self.virtual = virtual
        self.backend = backend
        self.of_piece = of_piece
        self.dtype = dtype
        self.traced = of_piece.traced

    def rows(self, batch: Batch, replica: tf.Tensor) -> ReplicaRows:
        """All rows of the process: pieces know their own."""
        read = _rows_read(self.virtual, self.backend, batch)
        return process_rows(batch, 0)._replace(rows_read=read)

    def __call__(self, inputs: StepInputs) -> ReplicaSums:
        """Inside ``Backend.run``; ``inputs`` are those of the process."""
        virtual, backend = self.virtual, self.backend
        replica, found = replica_number(backend), self.traced.found
        one_each = virtual.count == backend.replicas
        shapes = self.traced.shapes
        layout = SumsLayout(shapes, self.dtype, shapes.state, apart=one_each)
        pieces = virtual.pieces(range(replica, replica + 1), backend.replicas)
        held = virtual.held(backend)
        first, _ = share(inputs.global_rows, held[0], virtual.count)
        variables = len(inputs.weights.trainable)

        def leaf(piece: tf.Tensor) -> Piece:
            start, stop = share(inputs.global_rows, piece, virtual.count)
            rows: Rows = slice_rows(inputs.rows, start - first, stop - first)
            own = inputs._replace(rows=rows, count=stop - start, replica=piece)
            sums = self.of_piece.sums(own)
            return Piece(layout.pack(sums), finite.first_of(sums, found, variables))

        subtrees = virtual.subtrees(replica, backend.replicas)
        vectors, mark, _ = sum_subtrees(leaf, pieces, subtrees, layout.specs)
        return ReplicaSums(SubtreeSums(vectors, layout, inputs.number), mark, found)


def replica_number(backend: Backend) -> int:
    """Inside ``Backend.run``: the number of this replica, known when it is traced."""
    if len(backend.local_replicas) == 1:
        return backend.local_replicas[0]
    return int(tf.get_static_value(backend.replica()))


def rows_of_pieces(
    virtual: VirtualReplicas, backend: Backend, batch: Batch
) -> ReplicaRows:
    """All rows of a process, and the place of the first in the global batch."""
    first, _ = share(batch.global_rows, virtual.held(backend)[0], virtual.count)
    return process_rows(batch, first)


def _rows_read(virtual: VirtualReplicas, backend: Backend, batch: Batch) -> Any:
    """``Batch.rows_read`` of this replica's pieces, of those of the process."""
    if len(backend.local_replicas) == 1:
        return batch.rows_read
    replica = replica_number(backend)
    held = virtual.held(backend)
    own = virtual.pieces(range(replica, replica + 1), backend.replicas)
    first, _ = share(batch.global_rows, held[0], virtual.count)
    start, _ = share(batch.global_rows, own[0], virtual.count)
    _, stop = share(batch.global_rows, own[-1], virtual.count)
    return slice_rows(batch.rows_read, start - first, stop - first)


class SumsLayout:
    """Sums as vectors, and back.

    Args:
        dtype: Of the vectors, but for what it cannot hold: float64.
        exact: The part of the structure that must not be rounded to this dtype.
        apart: Large tensors are vectors of their own, without a copy. To add up pieces
            in a graph, one vector takes less time to trace.
    """

    def __init__(self, structure: Any, dtype: tf.DType, exact: Any, apart: bool):
        self._structure = structure
        leaves = tf.nest.flatten(structure)
        wider = {id(t) for t in tf.nest.flatten(exact) if t.dtype.size > dtype.size}
        self._shapes = [t.shape for t in leaves]
        self._sizes = [shape.num_elements() for shape in self._shapes]
        groups: dict[tuple[tf.DType, int], list[int]] = {}
        for i, (leaf, size) in enumerate(zip(leaves, self._sizes, strict=True)):
            wide = tf.float64 if id(leaf) in wider else dtype
            alone = apart and size > SMALL
            groups.setdefault((wide, i if alone else -1), []).append(i)
        self._groups = list(groups.values())
        self.specs = [
            tf.TensorSpec([sum(self._sizes[i] for i in group)], wide)
            for (wide, _), group in groups.items()
        ]

    def pack(self, sums: Any) -> list[tf.Tensor]:
        """The vectors."""
        leaves = tf.nest.flatten(sums)
        vectors = []
        for group, spec in zip(self._groups, self.specs, strict=True):
            parts = [tf.reshape(tf.cast(leaves[i], spec.dtype), [-1]) for i in group]
            vectors.append(join(parts))
        return vectors

    def unpack(self, vectors: list[tf.Tensor]) -> Any:
        """The sums that ``pack`` made vectors of."""
        leaves: list[Any] = [None] * len(self._shapes)
        for group, vector in zip(self._groups, vectors, strict=True):
            parts = cut(vector, [self._sizes[i] for i in group])
            for i, part in zip(group, parts, strict=True):
                leaves[i] = tf.reshape(part, self._shapes[i])
        return tf.nest.pack_sequence_as(self._structure, leaves)


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
