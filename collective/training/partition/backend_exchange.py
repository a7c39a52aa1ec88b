"""The exchange of a backend: sums, and what can be made of its sums and gathers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import ShardCollectives
from collective.tensorflow_ops.text import gather_strings
from collective.training.keras_compat.tensorflow_names import wait_for
from collective.training.partition import pieces
from collective.training.partition.exchange import (
    Exchange,
    Gradients,
    Message,
    OnOneDevice,
    Opens,
    Values,
)
from collective.training.partition.markers import FIRST, GATHER, Marker
from collective.training.partition.own import (
    REDUCE,
    Own,
    arrived,
    carried,
    carrier_of,
    combined,
)
from collective.training.process.object_collectives import join
from collective.training.step.reduction import sum_tensors
from collective.training.virtual.pieces import VirtualReplicas
from collective.training.virtual.tree import OneReplica, Tree, as_bits


class BackendExchange(OnOneDevice):
    """Sums by a backend; everything else is made of sums, or of its gather.

    Args:
        virtual: The pieces that the replicas of a process are, whose sums have the same
            bits on any number of processes. If None, a sum is added in any order.
        axes: By the name of another axis of the mesh: the exchange along it.
    """

    def __init__(
        self,
        backend: Backend,
        virtual: VirtualReplicas | None = None,
        axes: Mapping[str, Exchange] | None = None,
    ):
        self._backend, self._axes = backend, axes or {}
        self.tree = None if virtual is None else Tree(virtual, backend)

    @property
    def place(self) -> tuple[int, int]:
        """See ``Exchange``."""
        return self._backend.rank, self._backend.size

    def added(self, kind: str, parts: Sequence[tf.Tensor]) -> Own:
        """See ``Exchange``. Sums are added in the dtype in which they travel."""
        dtype = parts[0].dtype
        if kind != "sum":
            return Own(parts, dtype)
        carrier = carrier_of(dtype)
        sent = [carried(tensor, carrier) for tensor in parts]
        if self.tree is not None and carrier.is_floating:
            return Own(self.tree.of_subtrees(sent), dtype)
        return Own([combined("sum", sent)], dtype)

    def reduce(self, message: Message) -> list[tf.Tensor]:
        """See ``Exchange``. Sums travel in one message for each dtype."""
        if message.kind != "sum":
            gathered = (self.gather(tf.stack(own.parts)) for own in message.values)
            return [REDUCE[message.kind](whole, axis=0) for whole in gathered]
        if not message.scattered:
            return self._sums(message.values, message.gradients)
        # Gradients first, in their order: each is in memory until its pieces are sent.
        own = self._scatter(message.scattered)
        with tf.control_dependencies(own):
            return [*self._sums(message.values, message.gradients), *own]

    def _sums(self, values: Values, gradients: Gradients) -> list[tf.Tensor]:
        results: dict[int, tf.Tensor] = {}
        by_carrier: dict[tf.DType, list[int]] = {}
        for place, own in enumerate(values):
            by_carrier.setdefault(carrier_of(own.dtype), []).append(place)
        for carrier, places in by_carrier.items():
            sent = [values[i].parts for i in places]
            if self.tree is not None and carrier.is_floating:
                sums = self.tree.total(sent)
            else:
                rounded = [i for i, place in enumerate(places) if place in gradients]
                sums = self._all_reduce([tensor for (tensor,) in sent], rounded)
            for i, summed in zip(places, sums, strict=True):
                results[i] = arrived(summed, values[i].dtype)
        return [results[i] for i in range(len(values))]

    def _all_reduce(
        self, tensors: list[tf.Tensor], rounded: list[int]
    ) -> list[tf.Tensor]:
        return sum_tensors(self._backend, tensors, rounded)

    def _scatter(self, values: Values) -> list[tf.Tensor]:
        """Return this rank's pieces of the sums: half the bytes of the sums."""
        part, parts = self.place
        if self.tree is not None:
            sums = self._sums(values, {})
            return [pieces.cut(total, part, parts) for total in sums]
        tensors = [own.parts[0] for own in values]
        found = list(tensors)
        before: list[tf.Tensor] = []
        elements = [tensor.shape.num_elements() for tensor in tensors]
        for group in pieces.groups(tensors, elements):
            rows = [pieces.as_rows(tensors[i], parts) for i in group]
            assert isinstance(self._backend, ShardCollectives)
            with tf.control_dependencies(before):
                own = self._backend.reduce_scatter(join(rows, axis=1))
            self._open((gate for i in group for gate in values[i].opens), own)
            before = [own]
            split = tf.split(own, [row.shape[1] for row in rows])
            for i, piece in zip(group, split, strict=True):
                length = pieces.lengths(tensors[i].shape, parts)[part]
                found[i] = arrived(piece[:length], values[i].dtype)
        return found

    def _open(self, gates: Iterable[tf.Operation], sent: tf.Tensor) -> None:
        """Have gates wait until something is sent.

        Not if that itself waits for the clock, which waits for all gradients: a circle.
        """
        if self._backend.sends_as_made:
            for gate in gates:
                wait_for(gate, [sent.op])

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """See ``Exchange``; for numbers and text."""
        if tensor.dtype == tf.string:
            return gather_strings(tensor, self.gather)
        carrier = carrier_of(tensor.dtype)
        sent = carried(tensor, carrier)
        assert isinstance(self._backend, ShardCollectives)
        if self.tree is None:
            return arrived(self._backend.gather_rows(sent), tensor.dtype)
        bits = self._backend.gather_rows(as_bits(sent))  # which may be made of sums
        return arrived(tf.bitcast(bits, carrier), tensor.dtype)

    def join(
        self, own: Sequence[tf.Tensor], shapes: Sequence[Any], opens: Opens = ()
    ) -> list[tf.Tensor]:
        """See ``Exchange``. Small tensors travel together."""
        found, parts = list(own), self.place[1]
        before: list[tf.Tensor] = []
        elements = [tf.TensorShape(shape).num_elements() or 0 for shape in shapes]
        for group in pieces.groups(own, elements):
            with tf.control_dependencies(before):
                gathered = self.gather(join([own[i] for i in group]))
            before = [gathered]
            self._open((gate for i in group if opens for gate in opens[i]), gathered)
            wholes = pieces.joined(gathered, [shapes[i] for i in group], parts)
            for i, whole in zip(group, wholes, strict=True):
                found[i] = whole
        return found

    def of_marker(
        self, marker: Marker, op: tf.Operation, tensors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """See ``Exchange``."""
        return exchanged(self._axes[marker.axis], marker, tensors)

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """See ``Exchange``. Every other rank adds zeros to the bits."""
        is_root = tf.equal(tf.cast(self._backend.replica(), tf.int32), 0)
        if tensor.dtype == tf.string or not tensor.shape.is_fully_defined():
            return self._broadcast_any_shape(tensor, is_root)
        carrier = carrier_of(tensor.dtype)
        bits = as_bits(carried(tensor, carrier))
        sent_bits = tf.where(is_root, bits, tf.zeros_like(bits))
        own = self.added("sum", [sent_bits])
        (sent,) = self._sums([own], {})  # no sum of a step, which is checked
        return arrived(tf.bitcast(sent, carrier), tensor.dtype)

    def _broadcast_any_shape(self, tensor: tf.Tensor, is_root: tf.Tensor) -> tf.Tensor:
        """Gather a shape and elements, of which every other rank has none."""
        sent = tf.cast(is_root, tf.int64)
        own = tf.shape(tensor, tf.int64)
        shape = self.gather(own[: sent * tf.size(own, tf.int64)])
        with tf.control_dependencies([shape]):
            flat = tf.reshape(tensor, [-1])
            flat = self.gather(flat[: sent * tf.size(flat, tf.int64)])
        return tf.ensure_shape(tf.reshape(flat, shape), tensor.shape)


def exchanged(
    along: Exchange, marker: Marker, tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Make the exchange that a marker stands for, of tensors of this process."""
    if marker.kind == GATHER:
        return [along.gather(tensors[0])]
    if marker.kind == FIRST:
        return [along.broadcast(tensors[0])]
    own = [along.added(marker.kind, [tensor]) for tensor in tensors]
    return along.reduce(Message(marker.kind, own))


class OneOrderedProcess(BackendExchange):
    """The exchange of a job of one process, with ordered sums over pieces."""

    def __init__(self, virtual: VirtualReplicas):
        self.tree, self._axes = Tree(virtual, OneReplica()), {}

    def _all_reduce(
        self, tensors: list[tf.Tensor], rounded: list[int]
    ) -> list[tf.Tensor]:
        return tensors

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tensor."""
        return tensor

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tensor."""
        return tensor
