"""Pieces of virtual replicas, of what needs the whole batch; see ``LocalSums``.

As micro-batches of it (``micro_batches.py``), but every rank computes the loss on the same
rows in the same order, and as a whole: it is counted with the first piece, and no rank has
a share of it. So the bits depend on the number of pieces alone. What is gathered travels
as bit patterns, of which all but one are zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from collective.training.input.pipeline import Batch
from collective.training.input.plan import share
from collective.training.step import finite
from collective.training.step.accumulation import slice_rows
from collective.training.step.forward import Sums
from collective.training.step.found import Found
from collective.training.step.inputs import ReplicaRows, StepInputs
from collective.training.step.parts import ReplicaSums
from collective.training.step.passes import TracedPass
from collective.training.step.plan import StepPlan
from collective.training.step.rows import Rows, at_least_one_row
from collective.training.variants.coupled import look_ups
from collective.training.variants.coupled.micro_batches import (
    CoupledMicroBatches,
    added_to,
)
from collective.training.variants.coupled.replica import (
    ReplicaContext,
)
from collective.training.variants.virtual.pieces import Node, VirtualReplicas
from collective.training.variants.virtual.sums import (
    SubtreeSums,
    SumsLayout,
    replica_number,
    rows_of_pieces,
)
from collective.training.variants.virtual.tree import BITS, Leaf, Piece, sum_subtrees


def planned(plan: StepPlan) -> StepPlan:
    """The plan, with metrics beside a loss of the whole batch computed as it is."""
    whole = plan.gather_loss or plan.gather_metrics
    return dataclasses.replace(plan, gather_loss=whole, gather_metrics=whole)


@dataclass(eq=False)
class Holder(ReplicaContext):
    """A replica that holds pieces, consecutive ones."""

    start: tf.Tensor  # int64 scalar, the place of its first row in the global batch

    @property
    def first_row(self) -> tf.Tensor:
        """As of ``ReplicaContext``."""
        return self.start

    @property
    def share(self) -> tf.Tensor:
        """All: what each replica has is counted on one of them."""
        return tf.ones([], tf.float64)

    def _in_order(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gathers: of each number, all replicas but one have zero."""
        kinds = [
            BITS.get(t.dtype.size) if t.dtype.is_floating else None for t in tensors
        ]
        sent = [
            t if kind is None else tf.bitcast(t, kind)
            for t, kind in zip(tensors, kinds, strict=True)
        ]
        return [
            tf.bitcast(t, like.dtype)
            for t, like in zip(super()._in_order(sent), tensors, strict=True)
        ]


class CoupledPieces(CoupledMicroBatches):
    """Sums over the pieces of this replica, with collectives between two passes.

    Arguments as of ``PieceSums``, and as of ``CoupledMicroBatches`` of a piece.
    """

    def __init__(
        self, virtual: VirtualReplicas, dtype: tf.DType, *given: Any, **more: Any
    ):
        super().__init__(*given, **more)
        self.virtual = virtual
        self.dtype = dtype

    def rows(self, batch: Batch, replica: tf.Tensor) -> ReplicaRows:
        """All rows of the process."""
        return rows_of_pieces(self.virtual, self.backend, batch)

    def __call__(self, inputs: StepInputs) -> ReplicaSums:
        """Inside ``Backend.run``: the sums of this replica."""
        place = inputs.replica, inputs.count, inputs.global_rows
        holder = Holder(self.backend, *place, self.maybe_empty, inputs.first_row)
        if self.first is None:
            return self._sums(inputs, holder, inputs.rows, None)
        rows = inputs.rows
        predictions = self._predictions(self.first, inputs)
        if self.maybe_empty:
            rows, predictions = at_least_one_row((rows, predictions), inputs.count)
        alike = inputs._replace(replica=tf.zeros([], tf.int64))  # the same draws
        *head, gradients = self._head(alike, holder, rows, predictions)
        return self._sums(inputs, holder, Rows(rows.x, gradients, ()), head)

    def _piece(
        self, inputs: StepInputs, rows: Rows, piece: tf.Tensor
    ) -> tuple[StepInputs, Rows, ReplicaContext]:
        """What a pass over a piece takes, from rows of this replica."""
        start, stop = share(inputs.global_rows, piece, self.virtual.count)
        first = start - inputs.first_row
        part: Rows = slice_rows(rows, first, first + stop - start)
        if self.maybe_empty:
            part = at_least_one_row(part, stop - start)
        own = inputs._replace(count=stop - start, replica=piece, first_row=start)
        place = piece, own.count, own.global_rows
        return own, part, ReplicaContext(self.backend, *place, self.maybe_empty)

    def _predictions(self, first: TracedPass, inputs: StepInputs) -> Any:
        """The predictions of all pieces, one after the other."""
        _, like = first.shapes

        def leaf(piece: tf.Tensor) -> Piece:
            own, rows, _ = self._piece(inputs, inputs.rows, piece)
            _, predictions = self._pass(first, own, rows)
            there = [t[: own.count] for t in tf.nest.flatten(predictions)]
            return Piece([], tf.zeros([]), there)

        kept = [_open(t) for t in tf.nest.flatten(like)]
        *_, rows = self._over_pieces(leaf, [], kept)
        return tf.nest.pack_sequence_as(like, rows)

    def _over_pieces(
        self, leaf: Leaf, specs: list[tf.TensorSpec], kept: list[tf.TensorSpec]
    ) -> tuple[dict[Node, list[tf.Tensor]], tf.Tensor, list[tf.Tensor]]:
        """As ``sum_subtrees``, over the pieces that this replica holds."""
        virtual, backend = self.virtual, self.backend
        subtrees = virtual.subtrees(replica_number(backend), backend.replicas)
        return sum_subtrees(leaf, virtual.held(backend), subtrees, specs, kept)

    def _sums(
        self, inputs: StepInputs, holder: Holder, rows: Rows, head: Any
    ) -> ReplicaSums:
        """The sums over all pieces.

        Args:
            rows: Those of the last pass.
            head: Sums of the loss of the whole batch, and what its trace has found.
        """
        variables = len(inputs.weights.trainable)

        def merged(sums: Sums, first: Any, piece: ReplicaContext) -> tuple[Sums, Found]:
            if head is None:
                return sums, self.last.found
            of_head = tf.nest.map_structure(
                lambda t: tf.where(first, t, tf.zeros_like(t)), head[0]
            )
            return added_to(of_head, head[1], sums, self.last.found, piece)

        zeros = tf.nest.map_structure(
            lambda t: tf.zeros(t.shape, t.dtype), self.last.shapes[0]
        )
        like, found = merged(zeros, True, holder)
        one_each = self.virtual.count == self.backend.replicas
        layout = SumsLayout(like, self.dtype, like.state, apart=one_each)

        def leaf(piece: tf.Tensor) -> Piece:
            own, part, context = self._piece(inputs, rows, piece)
            sums, slices = self._pass(self.last, own, part)
            sums = tf.nest.map_structure(context.own, sums)
            slices = [(context.own(values), indices) for values, indices in slices]
            sums, _ = merged(sums, piece == 0, context)
            of_piece = dataclasses.replace(found, look_ups=self._look_ups(slices))
            mark = finite.first_of(sums, of_piece, variables)
            return Piece(layout.pack(sums), mark, tf.nest.flatten(slices))

        kept = [_open(t) for t in tf.nest.flatten(self.last.shapes[1])]
        vectors, mark, tensors = self._over_pieces(leaf, layout.specs, kept)
        slices = tf.nest.pack_sequence_as(self.last.shapes[1], tensors)
        whole = look_ups.gathered(self._look_ups(slices), holder)
        gathered = [each.slices.values for each in whole.values()]
        with tf.control_dependencies(gathered):  # one collective after the other
            mark = tf.identity(mark)
        sums = SubtreeSums(vectors, layout, inputs.number)
        return ReplicaSums(sums, mark, dataclasses.replace(found, look_ups=whole))


def _open(like: Any) -> tf.TensorSpec:
    return tf.TensorSpec([None, *like.shape[1:]], like.dtype)
