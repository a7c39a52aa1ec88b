"""A method of a model, ``train_step`` or the like, partitioned for the rows of a process.

The method is traced once, for batches of any length; see
``collective.training.partition.partition``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import LocalDevices, ShardCollectives
from collective.training import keras_compat
from collective.training.input.pipeline import Batch
from collective.training.keras_compat.traced import traced
from collective.training.partition import composites, explain
from collective.training.partition.emission import Traffic
from collective.training.partition.exchange import BackendExchange
from collective.training.partition.graph import Value
from collective.training.partition.layouts import ROWS, SUM, WHOLE
from collective.training.partition.partition import Partition, Placed
from collective.training.partition.plans import Rows
from collective.training.partition.shares import Share
from collective.training.step.inputs import ReplicaRows
from collective.training.step.rows import rows_of


class PartitionedMethod:
    """A function of the rows of a batch.

    Args:
        function: Called with trees of tensors ``x, y, sample_weight``, ``()`` for what is
            absent; returns a tree of tensors.
        spec: ``Batch`` of ``tf.TensorSpec`` with an open first dimension.
        expected_rows: How many rows a batch mostly has.
        micro_batches: Into how many pieces a process cuts its rows, to save memory.
        fixed_rows: The rows of every batch, if the model takes no other number.
        whole_gradients: Whether gradients of variables are summed as such, and not what
            is computed of them.
        placed: Returns the variables of a traced graph of which each rank has a piece; see
            ``Partition``.
        tracing: What is entered while the function is traced.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        spec: Batch,
        *,
        expected_rows: int | None = None,
        micro_batches: int = 1,
        fixed_rows: int | None = None,
        whole_gradients: bool = False,
        placed: Callable[[Any], Mapping[int, Placed]] = lambda graph: {},
        tracing: AbstractContextManager[Any] | None = None,
    ):
        rows = rows_of(spec)
        if fixed_rows is not None:
            rows = tf.nest.map_structure(lambda s: _with_rows(s, fixed_rows), rows)
        noted: list[tuple[Any, tf.Tensor]] = []
        around = tracing or contextlib.nullcontext()
        with around, keras_compat.calls.record_gradients(noted):
            self.source = traced(function).get_concrete_function(*rows)
        # Those that are computed in the graph itself, not in a loop or branch.
        self.gradients = [(v, t) for v, t in noted if t.graph is self.source.graph]
        self.micro_batches = micro_batches
        self.traffic = Traffic()
        layouts = []
        for leaf in tf.nest.flatten(tuple(rows)):
            parts = tf.nest.flatten(leaf, expand_composites=True)
            layouts += [ROWS if _is_dense(leaf) else WHOLE] * len(parts)
        known = Rows.unknown(expected_rows)
        if fixed_rows is not None:
            known = Rows(fixed_rows, fixed_rows)
        known = dataclasses.replace(known, whole_gradients=whole_gradients)
        # The first of the variables that share a gradient.
        by_name = {tensor.name: v for v, tensor in reversed(self.gradients)}
        self.partition = Partition(
            self.source, layouts, known, by_name, placed(self.source.graph)
        )
        self._names = [tensor.name for tensor in self.source.graph.outputs]

    def explain(self, name: str) -> None:
        """Log what is gathered and computed whole; after the first call.

        Args:
            name: What the method is, for the lines.
        """
        explain.report(self.partition, self.traffic, name)

    def names_of_first_sum(self) -> list[str]:
        """Return the names of ``names_of_first_sum`` for this method."""
        return names_of_first_sum(self.traffic)

    @property
    def graph(self) -> tf.Graph:
        """Return the graph for a whole batch, as it was traced."""
        return self.source.graph

    @property
    def structure(self) -> Any:
        """Return what the function returned when it was traced."""
        return self.source.graph.structured_outputs

    def __call__(
        self,
        own: ReplicaRows,
        total: tf.Tensor,
        replica: tf.Tensor,
        exchange: BackendExchange,
        attached: Sequence[tf.Tensor] = (),
    ) -> tuple[Any, list[tf.Tensor]]:
        """Inside ``Backend.run``: what the function returns for the whole batch.

        Args:
            own: The rows of this process.
            total: int64 scalar, those of the batch.
            replica: int64 scalar, the number of the replica.
            attached: More tensors of this process that are summed over the ranks.

        Returns:
            The tree, and the sums of what is attached.
        """
        arguments, share = self._cut(own, total, replica, exchange)
        wanted = [WHOLE] * len(self._names)
        outputs, sums = self.partition.emit(
            arguments, share, exchange, self.traffic, wanted, attached
        )
        return self._packed([output[0] for output in outputs]), sums

    def overrun(self, exchange: BackendExchange) -> tf.Tensor:
        """Inside ``Backend.run``: writes what is written whatever the rows are."""
        return self.partition.emit_without_rows(exchange)

    def rows(
        self,
        own: ReplicaRows,
        total: tf.Tensor,
        replica: tf.Tensor,
        exchange: BackendExchange,
    ) -> Any:
        """Like ``__call__``, for outputs that have rows: returns this process's rows."""
        arguments, share = self._cut(own, total, replica, exchange)
        dense = self._dense_outputs()
        wanted = [
            ROWS if value.layout == ROWS and name in dense else WHOLE
            for value, name in zip(
                self.partition.graph.outputs, self._names, strict=True
            )
        ]
        outputs, _ = self.partition.emit(
            arguments, share, exchange, self.traffic, wanted
        )
        begin, count = own.first, tf.cast(own.count, tf.int64)
        found = []
        for name, tensors, layout in zip(self._names, outputs, wanted, strict=True):
            if layout == ROWS:
                found.append(tensors[0] if len(tensors) == 1 else tf.concat(tensors, 0))
            elif name in dense:
                found.append(_own_rows(tensors[0], begin, count, total))
            else:
                found.append(tensors[0])
        return tf.nest.map_structure(
            lambda leaf: (
                leaf
                if tf.is_tensor(leaf) and not _is_composite(leaf)
                else composites.rows_of(leaf, begin, count)
            ),
            self._packed(found),
        )

    def _dense_outputs(self) -> set[str]:
        """Return the names of the tensors that are not part of a ragged or sparse one."""
        leaves = tf.nest.flatten(self.structure)
        return {leaf.name for leaf in leaves if isinstance(leaf, tf.Tensor)}

    def _packed(self, tensors: Sequence[tf.Tensor]) -> Any:
        by_name = dict(zip(self._names, tensors, strict=True))
        flat = tf.nest.flatten(self.structure, expand_composites=True)
        return tf.nest.pack_sequence_as(
            self.structure,
            [by_name[t.name] if tf.is_tensor(t) else t for t in flat],
            expand_composites=True,
        )

    def _cut(
        self,
        own: ReplicaRows,
        total: tf.Tensor,
        replica: tf.Tensor,
        exchange: BackendExchange,
    ) -> tuple[list[list[tf.Tensor]], Share]:
        """Return the arguments for each micro-batch, and which rows they have."""
        leaves = tf.nest.flatten(tuple(own.rows))
        cuts = self._cuts(own, total, exchange)
        arguments: list[list[tf.Tensor]] = []
        for leaf in leaves:
            if not tf.is_tensor(leaf) or isinstance(
                leaf, tf.RaggedTensor | tf.SparseTensor
            ):
                whole = composites.gathered(leaf, own.first, total, exchange)
                parts = tf.nest.flatten(whole, expand_composites=True)
                arguments += [[part] for part in parts]
            elif len(cuts) > 1:
                arguments.append([leaf[begin:end] for begin, end in cuts])
            else:
                arguments.append([leaf])
        replicas = [
            (own.first + begin, end - begin, tf.equal(replica, 0) if not j else False)
            for j, (begin, end) in enumerate(cuts)
        ]
        return arguments, Share.of(total, replicas)

    def _cuts(
        self, own: ReplicaRows, total: tf.Tensor, exchange: BackendExchange
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Return where each micro-batch begins and ends among the rows of this process."""
        pieces = [(tf.zeros([], tf.int64), tf.cast(own.count, tf.int64))]
        if exchange.tree is not None:
            pieces = [
                (start - own.first, stop - start)
                for start, stop in exchange.tree.bounds(total)
            ]
        count = self.micro_batches
        if exchange.tree is None:
            count *= max(len(exchange.devices), 1)
        found: list[tuple[tf.Tensor, tf.Tensor]] = []
        for begin, rows in pieces:
            ends = [begin + rows * j // count for j in range(count + 1)]
            found += itertools.pairwise(ends)
        return found


def names_of_first_sum(traffic: Traffic) -> list[str]:
    """Return for each tensor of the first sum whose gradient it becomes, or an empty name."""
    kinds = (values for values in traffic.sums if values[:1])
    first = next((v for v in kinds if v[0].layout == SUM), [])
    return [_name_of(value) for value in first]


def _name_of(value: Value, depth: int = 6) -> str:
    """Return the path of the variable whose gradient a value becomes, or nothing."""
    ahead = [value]
    for _ in range(depth):
        for found in ahead:
            if found.variable is not None:
                return keras_compat.model.path_of(found.variable)
        ahead = [out for v in ahead for node in v.users for out in node.outputs][:64]
    return ""


def _own_rows(
    tensor: tf.Tensor, begin: tf.Tensor, count: tf.Tensor, total: tf.Tensor
) -> tf.Tensor:
    """Return the rows of this process; all of a tensor that has not one for each row."""
    if tensor.shape.rank == 0:
        return tensor
    has_rows = tf.equal(tf.shape(tensor, tf.int64)[0], total)
    first = tf.where(has_rows, begin, 0)
    last = tf.where(has_rows, begin + count, tf.shape(tensor, tf.int64)[0])
    return tensor[first:last]


def supports(backend: Backend) -> bool:
    """Return whether a backend has what a partitioned method exchanges."""
    if isinstance(backend, LocalDevices):
        return True
    if len(backend.local_replicas) != 1 or not backend.synchronous:
        return False
    exchanges = isinstance(backend, ShardCollectives) and backend.size > 1
    return exchanges or (backend.replicas == 1 and backend.size == 1)


def _is_composite(leaf: Any) -> bool:
    return isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)


def _is_dense(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec)


def _with_rows(spec: Any, rows: int) -> Any:
    """Return the spec of so many rows, if it is the spec of a dense tensor."""
    if not _is_dense(spec):
        return spec
    return tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype)
