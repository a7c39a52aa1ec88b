"""Batches that follow from the number of the step, under Keras' own loops.

Keras gets a data set of stand-ins, as many as a pass has batches. The function of a batch
counts them, and has the batch read in their place, of which a process reads its own rows
only. So a training that is resumed reads nothing of the steps that were made before, and
after a change of its ranks each of them reads another part of the same batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from collective.backends.base import Backend
from collective.training.input.leaves import present
from collective.training.input.pipeline import Batch, Input, ReadAhead
from collective.training.input.plan import ENDLESS
from collective.training.input.source import explain
from collective.training.step.rows import packed, rows_of, zeros
from collective.training.virtual.pieces import VirtualReplicas


class PlannedBatches:
    """Reads the batches of an ``Input``, pass after pass.

    Every process reads all rows of a batch if some are ragged or sparse, or if the source
    has no random access.

    Args:
        backend: Its replicas share each batch.
        virtual: The pieces that replicas hold. If None, each has a share of the rows.
        most: How many batches of a pass are read at most. If None, one pass follows the
            other, and is read ahead.

    Attributes:
        after_read: Called with each batch that is read, and whether only the own rows were.
    """

    def __init__(
        self,
        inputs: Input,
        backend: Backend,
        virtual: VirtualReplicas | None = None,
        most: int | None = None,
    ):
        self._inputs, self._backend, self._virtual = inputs, backend, virtual
        self._most = most
        self.after_read: list[Callable[[Batch, bool], None]] = []
        self._pass, self._number = -1, 0  # of the batch that was counted last
        self._iterator: Any = None  # of Keras, for this pass
        moves = most is not None or backend.elastic
        self._open = inputs.movable() if moves else inputs.read_ahead
        self._reads: ReadAhead | None = None
        self._opened: Any = None  # the batch that follows, and for which replicas
        self._last: Any = None  # the batch that was read last, its number and replicas
        parts = present(inputs.spec)
        is_dense = all(isinstance(part, tf.TensorSpec) for part in parts)
        self._is_cut = is_dense and inputs.source.random_access

    @property
    def steps(self) -> int:
        """Return the batches of a pass."""
        of_pass = self._inputs.steps_per_epoch
        return of_pass if self._most is None else min(of_pass, self._most)

    def stand_ins(self) -> tf.data.Dataset:
        """Return what Keras' loop reads: a row of zeros for each batch of a pass."""
        row = packed(zeros(self._inputs.spec))
        options = tf.data.Options()
        # There is nothing to tune, and an iterator ends only when the tuner's thread wakes.
        options.autotune.enabled = False
        rows = tf.data.Dataset.from_tensors(row).repeat(self.steps)
        return rows.with_options(options)

    def whole(self) -> tf.data.Dataset:
        """Return whole batches, for Keras' own functions; those of all passes in turn."""
        last = ENDLESS if self._most is None else self.steps
        batches = self._inputs.dataset(0, last, range(1), 1)
        # A NamedTuple is one argument to tf.data.
        return batches.map(lambda batch: packed(rows_of(batch)))

    @functools.cached_property
    def spec(self) -> Any:
        """Return the tree of ``tf.TypeSpec`` of the batches, as a step of Keras has them."""
        graph = tf.Graph()
        with graph.as_default():
            rows = packed(
                tf.nest.map_structure(_placeholder, rows_of(self._inputs.spec))
            )
        return tf.nest.map_structure(tf.type_spec_from_value, rows)

    def count(self, iterator: Any) -> None:
        """Note that Keras has read one stand-in more.

        Args:
            iterator: What Keras reads them from; with another one a pass begins.
        """
        if iterator is not self._iterator:
            self._iterator = iterator
            self._pass += 1
            self._number = self._pass * self._inputs.steps_per_epoch
            if self._most is not None:  # the batches that were read end before
                self._opened = None
        else:
            self._number += 1

    def read(self) -> Any:
        """Return the batch that was counted last, for the ranks that are there now.

        Returns:
            A ``Batch`` with the rows of this process, or all rows as Keras has them.

        Raises:
            UsageError: The data cannot be read.
        """
        replicas = self._replicas()
        if self._last is not None and self._last[:2] == (self._number, replicas):
            return self._last[2]
        if self._opened != (self._number, replicas):
            self._begin(*replicas)
        assert self._reads is not None
        try:
            batch: Batch = next(self._reads)
        except tf.errors.OpError as error:
            explained = explain(error)
            if explained is None:
                raise
            raise explained from None
        self._opened = self._number + 1, replicas
        for note in self.after_read:
            note(batch, self._is_cut)
        found = batch if self._is_cut else packed(rows_of(batch))
        self._last = self._number, replicas, found
        return found

    def _begin(self, local: range, replicas: int) -> None:
        """Read from the batch that was counted last."""
        self.close()
        last = ENDLESS
        if self._most is not None:
            last = self._pass * self._inputs.steps_per_epoch + self.steps
        self._reads = self._open(self._number, last, local, replicas)

    def _replicas(self) -> tuple[range, int]:
        """Return the replicas of this process, or its pieces of a batch, and their number."""
        if not self._is_cut:
            return range(1), 1
        local, replicas = self._backend.local_replicas, self._backend.replicas
        if self._virtual is None:
            return local, replicas
        return self._virtual.pieces(local, replicas), self._virtual.count

    def close(self) -> None:
        """End what reads ahead. May be called twice."""
        if self._reads is not None:
            self._reads.close()
        self._reads = self._opened = self._last = None


def _placeholder(spec: tf.TypeSpec) -> Any:
    parts = [
        tf.compat.v1.placeholder(part.dtype, part.shape)
        for part in tf.nest.flatten(spec, expand_composites=True)
    ]
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)
