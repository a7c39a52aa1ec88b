"""The sums and gathers of a step: everything that one replica learns of the others.

Emitted graphs know no backend. They ask an ``Exchange``, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import ShardCollectives
from collective.tensorflow_ops.ranks import run_independently
from collective.tensorflow_ops.text import gather_strings
from collective.training.keras_compat.tensorflow_names import wait_for
from collective.training.partition import pieces
from collective.training.partition.markers import FIRST, GATHER, Marker
from collective.training.partition.own import (
    REDUCE,
    Own,
    arrived,
    carried,
    carrier_of,
    combined,
    first_not_finite,
)
from collective.training.process.object_collectives import join
from collective.training.step import finite
from collective.training.step.clock import now
from collective.training.step.reduction import sum_tensors
from collective.training.virtual.pieces import VirtualReplicas
from collective.training.virtual.tree import OneReplica, Tree, as_bits

Values = Sequence[Own]
"""For each value, what this process has of it."""
Gradients = Mapping[int, Any]
"""The variable of which a value is the gradient, by the value's index."""
NONE: Gradients = {}
Opens = Sequence[Sequence[tf.Operation]]


class Exchange(Protocol):
    """What an emitted graph asks of the other ranks, inside of the graph.

    Attributes:
        devices: Of this process, where it has several: its replicas are shared out over
            them, in order.
        copies_variables: Whether each device has a copy of every variable.
        tree: The order of sums over pieces. If None, they are added in any.
    """

    devices: Sequence[str]
    copies_variables: bool
    tree: Tree | None

    @property
    def place(self) -> tuple[int, int]:
        """Return which piece of an ``Owned`` tensor this process has, of how many."""
        ...

    def added(self, kind: str, parts: Sequence[tf.Tensor]) -> Own:
        """Add up the parts of one value, as far as this process can alone.

        Args:
            kind: sum, max, min, prod, any or all.
            parts: A tensor for every replica of this process, or one for all together.
        """
        ...

    def reduce(
        self,
        kind: str,
        values: Values,
        gradients: Gradients = NONE,
        scattered: Values = (),
    ) -> list[tf.Tensor]:
        """Return the sum (maximum, ...) of each value over all replicas of all ranks.

        Args:
            kind: sum, max, min, prod, any or all.
            values: What ``added`` made, of the same shapes and dtypes on every rank.
            gradients: Which of them are gradients, whose sums may be rounded.
            scattered: More values, of whose sums this rank gets its piece; see ``pieces``.

        Returns:
            The sums of ``values``, then the pieces.
        """
        ...

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tensors of all ranks along the first axis, in the order of the ranks."""
        ...

    def join(
        self, own: Sequence[tf.Tensor], shapes: Sequence[Any], opens: Opens = ()
    ) -> list[tf.Tensor]:
        """Return the tensors of these shapes of which each rank has its piece.

        Args:
            opens: For each, what waits until it is joined; empty if nothing does.
        """
        ...

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """Rank 0's tensor: numbers or text, of the same dtype on every rank."""
        ...

    def of_marker(
        self, marker: Marker, op: tf.Operation, tensors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return what an exchange along another axis of the mesh makes of tensors.

        Args:
            marker: Which exchange it is.
            op: The operation that stands for it, of which ``tensors`` are the inputs.
        """
        ...

    def copies(self, variable: tf.Variable) -> list[tf.Tensor]:
        """Return the handles of a variable on each device, or the one of all."""
        ...

    def reduce_devices(
        self,
        kind: str,
        columns: Sequence[Values],
        more: Sequence[tf.Tensor] = (),
    ) -> list[list[tf.Tensor]]:
        """Like ``reduce``; returns for each tensor a list of one, or of one for each device.

        Args:
            columns: For each device, what it has of each value.
            more: Tensors of this process.
        """
        ...


class OnOneDevice:
    """For exchanges whose replicas of a process are all on one device."""

    devices: Sequence[str] = ()
    copies_variables = False
    tree: Tree | None = None

    def copies(self, variable: tf.Variable) -> list[tf.Tensor]:
        """Return the handle of the variable."""
        return [variable.handle]

    def added(self, kind: str, parts: Sequence[tf.Tensor]) -> Own:
        """See ``Exchange``; adds them in their own dtype."""
        return Own([combined(kind, parts)], parts[0].dtype)

    def of_marker(
        self, marker: Marker, op: tf.Operation, tensors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Never called: the mesh has one axis."""
        raise NotImplementedError(marker)

    def reduce_devices(
        self,
        kind: str,
        columns: Sequence[Values],
        more: Sequence[tf.Tensor] = (),
    ) -> list[list[tf.Tensor]]:
        """Never called: there is one device."""
        raise NotImplementedError


class OneProcess(OnOneDevice):
    """The exchange of a job of one process: all replicas are here."""

    place = 0, 1

    def reduce(
        self,
        kind: str,
        values: Values,
        gradients: Gradients = NONE,
        scattered: Values = (),
    ) -> list[tf.Tensor]:
        """Reduce over the replicas of this process."""
        sums = [own.parts[0] for own in values]
        return [*sums, *(tf.reshape(own.parts[0], [-1]) for own in scattered)]

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tensor."""
        return tensor

    def join(
        self, own: Sequence[tf.Tensor], shapes: Sequence[Any], opens: Opens = ()
    ) -> list[tf.Tensor]:
        """Return the pieces, which are whole."""
        return [tf.reshape(t, shape) for t, shape in zip(own, shapes, strict=True)]

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tensor."""
        return tensor


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

    def reduce(
        self,
        kind: str,
        values: Values,
        gradients: Gradients = NONE,
        scattered: Values = (),
    ) -> list[tf.Tensor]:
        """See ``Exchange``. Sums travel in one message for each dtype."""
        if kind != "sum":
            gathered = (self.gather(tf.stack(own.parts)) for own in values)
            return [REDUCE[kind](whole, axis=0) for whole in gathered]
        if not scattered:
            return self._sums(values, gradients)
        # Gradients first, in their order: each is in memory until its pieces are sent.
        own = self._scatter(scattered)
        with tf.control_dependencies(own):
            return [*self._sums(values, gradients), *own]

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
        """This rank's pieces of the sums: half the bytes of the sums."""
        part, parts = self.place
        if self.tree is not None:
            sums = self._sums(values, NONE)
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
        (sent,) = self._sums([own], NONE)  # no sum of a step, which is checked
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
    return along.reduce(marker.kind, own)


class TimedExchange(BackendExchange):
    """Notes when its exchanges of the graph that it was made in begin and end.

    Args:
        number: Of the step: the first sum then fails on every rank where one of them is
            not finite on any (``collective.training.step.finite``).
        virtual, axes: As of ``BackendExchange``.
    """

    def __init__(
        self,
        backend: Backend,
        number: tf.Tensor | None = None,
        virtual: VirtualReplicas | None = None,
        axes: Mapping[str, Exchange] | None = None,
    ):
        super().__init__(backend, virtual, axes)
        self._number = number
        self._graph = tf.compat.v1.get_default_graph()
        self._start: tf.Tensor | None = None
        self._stop: tf.Tensor | None = None

    def reduce(
        self,
        kind: str,
        values: Values,
        gradients: Gradients = NONE,
        scattered: Values = (),
    ) -> list[tf.Tensor]:
        """See ``Exchange``."""
        if tf.compat.v1.get_default_graph() is not self._graph:  # in a loop or branch
            return super().reduce(kind, values, gradients, scattered)
        if self._start is None:
            parts = [tensor for own in (*values, *scattered) for tensor in own.parts]
            with tf.control_dependencies(parts):
                self._start = now()
            if self._backend.overlaps:
                run_independently(self._start)  # a bucket would wait for all gradients
            else:
                with tf.control_dependencies([self._start]):
                    values = [
                        Own([tf.identity(t) for t in own.parts], own.dtype)
                        for own in values
                    ]
        number = self._number
        if kind == "sum":
            self._number = None
        if number is None or kind != "sum":
            results = super().reduce(kind, values, gradients, scattered)
        else:
            located = self.added("sum", [self._located([*scattered, *values])])
            results = super().reduce(kind, [*values, located], gradients, scattered)
            place = self._of_all_axes(results.pop(len(values)), results)
            checks = self._checks(results, place, number, gradients)
            # Without an error, pieces do not wait for those of all other gradients.
            waiting = len(results) if checks else len(values)
            with tf.control_dependencies([place, *checks]):
                results[:waiting] = [tf.identity(t) for t in results[:waiting]]
        with tf.control_dependencies([self._start, *results]):
            self._stop = now()
        return results

    def _of_all_axes(self, place: tf.Tensor, before: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return what the ranks of all groups have located, so that all fail alike."""
        for along in self._axes.values():
            with tf.control_dependencies(before):
                (place,) = along.reduce("sum", [along.added("sum", [place])])
        return place

    def _checks(
        self,
        results: Sequence[tf.Tensor],
        place: tf.Tensor,
        number: tf.Tensor,
        gradients: Gradients,
    ) -> list[tf.Operation]:
        checks = finite.check(place, number, self._backend.of_all)
        if self._backend.rounds_to is not None:
            sums = [[results[i] for i in gradients]]
            checks += finite.check_transport(sums, [*gradients], place, number)
        return checks

    def _located(self, values: Values) -> tf.Tensor:
        """Return a vector with the place of this rank's first value that is not finite."""
        place = first_not_finite(values)
        return finite.at_replica(place, self._backend.of_all)

    def finish(self) -> None:
        """Write what it keeps for the next step, once the step can be applied."""

    def span(self) -> tuple[tf.Tensor, tf.Tensor]:
        """When the first began and the last ended: float64, seconds since 1970."""
        if self._start is None or self._stop is None:
            moment = now()
            return moment, moment
        return self._start, self._stop


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
