"""A ``train_step`` on the pieces of virtual replicas: one update, by sums along their tree.

The step runs once on each piece, where what it would apply is dropped, and once more on one row,
which counts nowhere, for its update: there ``tape.gradient`` returns the sums over all pieces.
So the bits depend on the number of pieces alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from collective.training.input import plan
from collective.training.input.pipeline import Batch
from collective.training.step import finite
from collective.training.step.accumulation import slice_rows
from collective.training.step.inputs import ReplicaRows
from collective.training.step.rows import Rows
from collective.training.variants.custom_step.accumulation import (
    AccumulatingStep,
    Gradients,
    MicroBatchHooks,
    Run,
)
from collective.training.variants.custom_step.additive import Key
from collective.training.variants.custom_step.local_step import Contribution
from collective.training.variants.virtual.sums import (
    SumsLayout,
    replica_number,
    rows_of_pieces,
)
from collective.training.variants.virtual.tree import Piece, sum_subtrees, total
from collective.training.virtual.pieces import VirtualReplicas


class PieceHooks(MicroBatchHooks):
    """The intercepted calls on one piece, or on a micro-batch of it."""

    feature, parts = "virtual_replicas", "pieces"


class UpdateHooks(PieceHooks):
    """The intercepted calls of the update.

    ``earlier`` are the sums over all pieces; and, as a last list, the places of what is
    not finite in them (``finite.at_replica``, summed).
    """

    def _summed(
        self, gradients: list[Any], variables: list[Any], key: Key | None = None
    ) -> list[Any]:
        self._note_look_ups(gradients, variables)
        dense = self._dense(gradients, variables)
        if key is not None:
            dense = self._totals(dense, variables)
        # Without a key they are computed from such sums: equal on all ranks already.
        self._global |= {id(gradient): gradient for gradient in dense}
        return dense

    def _totals(self, dense: list[tf.Tensor], variables: list[Any]) -> list[tf.Tensor]:
        assert self._earlier is not None
        totals, (located,) = self._earlier[len(self.own)], self._earlier[-1]
        self.own.append(totals)
        self._locate(totals, variables)
        self._located = [located]
        return [tf.cast(t, g.dtype) for t, g in zip(totals, dense, strict=True)]


@dataclass(eq=False)
class PieceStep(AccumulatingStep):
    """Calls a ``train_step`` on the pieces that one replica holds."""

    # The pieces of a global batch; ``micro_batches`` are those of a piece.
    virtual: VirtualReplicas = field(kw_only=True)

    def rows(self, batch: Batch, replica: tf.Tensor) -> ReplicaRows:
        """As of ``LocalStep``."""
        return rows_of_pieces(self.virtual, self.sums.backend, batch)

    def _hooks_of(self, earlier: Gradients | None) -> type[MicroBatchHooks]:
        return PieceHooks if earlier is None else UpdateHooks

    def _earlier_of(self, gradients: Gradients) -> Gradients:
        return [*gradients, [tf.zeros([self.sums.backend.most_replicas])]]

    def _on_all(self, run: Run, rows: Rows) -> Contribution:
        """On all pieces, and then the update; the sums are those of all replicas."""
        sums, gradients, located = self._over_pieces(run, rows)
        none = run.whole._replace(rows=tf.zeros_like(run.whole.rows))
        earlier = [*gradients, [located]]
        found, _ = self._one(run, slice_rows(rows, 0, 1), none, earlier)
        return found._replace(sums=sums)

    def totals(self, sums: Any, attached: Any) -> tuple[Any, Any]:
        """As of ``LocalStep``; the sums are totals already."""
        return sums, super().totals((), attached)[1]

    def _over_pieces(self, run: Run, rows: Rows) -> tuple[Any, Gradients, tf.Tensor]:
        """The sums over all pieces, and those of their gradients; what is not finite."""
        virtual, backend, share = self.virtual, self.sums.backend, run.whole
        like = self._zeros()
        wide = any(t.dtype == tf.float64 for t in tf.nest.flatten(like[1]))
        dtype = tf.float64 if wide else tf.float32
        one_each = virtual.count == backend.replicas
        layout = SumsLayout(like, dtype, like[0], apart=one_each)

        def leaf(piece: tf.Tensor) -> Piece:
            start, stop = plan.share(share.global_rows, piece, virtual.count)
            own = share._replace(rows=stop - start, first_row=start)
            first = start - share.first_row
            part = slice_rows(rows, first, first + own.rows)
            sums = self._add_up(run, part, own, self.micro_batches)
            return Piece(layout.pack(sums), finite.first(tf.nest.flatten(sums[1])))

        replica = replica_number(backend)
        subtrees = virtual.subtrees(replica, backend.replicas)
        found, mark, _ = sum_subtrees(
            leaf, virtual.held(backend), subtrees, layout.specs
        )
        by_subtree = [found[node] for node in subtrees]

        def summed(by_subtree: list[list[tf.Tensor]], number: tf.Tensor) -> Any:
            sums = dict(zip(subtrees, by_subtree, strict=True))
            return total(virtual, backend, replica, sums, always=number >= 0)

        run_total = tf.function(summed, autograph=False)  # backends sum within a graph
        vectors = self.sums.in_turn(
            tf.nest.flatten(by_subtree), lambda: run_total(by_subtree, share.number)
        )
        (located,) = self.sums([finite.at_replica(mark, backend)])
        whole = tf.nest.map_structure(
            lambda t, one: tf.cast(t, one.dtype), layout.unpack(vectors), like
        )
        return (*whole, located)
