"""The sums and gathers of a step: everything that one replica learns of the others.

Emitted graphs know no backend. They ask an ``Exchange``, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import ShardCollectives
from collective.tensorflow_ops.ranks import run_independently
from collective.training.exchange import join
from collective.training.partition import pieces
from collective.training.step import finite
from collective.training.step.clock import now
from collective.training.step.reduction import sum_tensors

_REDUCE = {
    "max": tf.reduce_max,
    "min": tf.reduce_min,
    "prod": tf.reduce_prod,
    "any": tf.reduce_any,
    "all": tf.reduce_all,
}
_NARROW = (tf.float16, tf.bfloat16, tf.float32)


class Exchange(Protocol):
    """What an emitted graph asks of the other ranks, inside of the graph."""

    @property
    def place(self) -> tuple[int, int]:
        """Which piece of an ``Owned`` tensor this process has, of how many."""
        ...

    def reduce(
        self,
        kind: str,
        tensors: Sequence[tf.Tensor],
        scattered: Sequence[tf.Tensor] = (),
    ) -> list[tf.Tensor]:
        """The sum (maximum, ...) of each tensor over all ranks.

        Args:
            kind: sum, max, min, prod, any or all.
            tensors: Of the same shapes and dtypes on every rank.
            scattered: More, of whose sums this rank gets its piece; see ``pieces``.

        Returns:
            The sums of ``tensors``, then the pieces.
        """
        ...

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensors of all ranks along the first axis, in the order of the ranks."""
        ...

    def join(self, own: Sequence[tf.Tensor], shapes: Sequence[Any]) -> list[tf.Tensor]:
        """The tensors of these shapes of which each rank has its piece."""
        ...

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """Rank 0's tensor, of the same shape and dtype on every rank."""
        ...


class OneProcess:
    """An exchange with nobody: all replicas are in this process."""

    place = 0, 1

    def reduce(
        self,
        kind: str,
        tensors: Sequence[tf.Tensor],
        scattered: Sequence[tf.Tensor] = (),
    ) -> list[tf.Tensor]:
        """The tensors."""
        return [*tensors, *(tf.reshape(tensor, [-1]) for tensor in scattered)]

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor."""
        return tensor

    def join(self, own: Sequence[tf.Tensor], shapes: Sequence[Any]) -> list[tf.Tensor]:
        """The pieces, which are whole."""
        return [tf.reshape(t, shape) for t, shape in zip(own, shapes, strict=True)]

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor."""
        return tensor


class BackendExchange:
    """Sums by a backend; everything else is made of sums, or of its gather."""

    def __init__(self, backend: Backend):
        self._backend = backend

    @property
    def place(self) -> tuple[int, int]:
        """As ``Exchange``."""
        return self._backend.rank, self._backend.size

    def reduce(
        self,
        kind: str,
        tensors: Sequence[tf.Tensor],
        scattered: Sequence[tf.Tensor] = (),
    ) -> list[tf.Tensor]:
        """As ``Exchange``. Sums travel in one message for each dtype."""
        if kind != "sum":
            return [_REDUCE[kind](self.gather(t[None]), axis=0) for t in tensors]
        results = list(tensors)
        by_dtype: dict[tf.DType, list[int]] = {}
        for place, tensor in enumerate(tensors):
            by_dtype.setdefault(_carrier(tensor.dtype), []).append(place)
        for carrier, places in by_dtype.items():
            sent = [_carried(tensors[i], carrier) for i in places]
            sums = sum_tensors(self._backend, sent, [])
            for i, summed in zip(places, sums, strict=True):
                results[i] = _arrived(summed, tensors[i].dtype)
        with tf.control_dependencies(results):
            return [*results, *self._scatter(scattered)]

    def _scatter(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """This rank's pieces of the sums: half the bytes of the sums."""
        found = list(tensors)
        part, parts = self.place
        before: list[tf.Tensor] = []
        elements = [tensor.shape.num_elements() for tensor in tensors]
        for group in pieces.groups(tensors, elements):
            dtype = tensors[group[0]].dtype
            rows = [
                pieces.as_rows(_carried(tensors[i], _carrier(dtype)), parts)
                for i in group
            ]
            assert isinstance(self._backend, ShardCollectives)
            with tf.control_dependencies(before):
                own = self._backend.reduce_scatter(join(rows, axis=1))
            before = [own]
            split = tf.split(own, [row.shape[1] for row in rows])
            for i, piece in zip(group, split, strict=True):
                length = pieces.lengths(tensors[i].shape, parts)[part]
                found[i] = _arrived(piece[:length], dtype)
        return found

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """As ``Exchange``, of any dtype that can be summed."""
        sent = _carried(tensor, _carrier(tensor.dtype))
        assert isinstance(self._backend, ShardCollectives)
        return _arrived(self._backend.gather_rows(sent), tensor.dtype)

    def join(self, own: Sequence[tf.Tensor], shapes: Sequence[Any]) -> list[tf.Tensor]:
        """As ``Exchange``. Small ones travel together."""
        found, parts = list(own), self.place[1]
        before: list[tf.Tensor] = []
        elements = [tf.TensorShape(shape).num_elements() or 0 for shape in shapes]
        for group in pieces.groups(own, elements):
            with tf.control_dependencies(before):
                gathered = self.gather(join([own[i] for i in group]))
            before = [gathered]
            wholes = pieces.joined(gathered, [shapes[i] for i in group], parts)
            for i, whole in zip(group, wholes, strict=True):
                found[i] = whole
        return found

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """As ``Exchange``: every other rank adds zeros."""
        is_root = tf.equal(tf.cast(self._backend.replica(), tf.int32), 0)
        mine = tf.where(is_root, tensor, tf.zeros_like(tensor))
        return self.reduce("sum", [mine])[0]


class TimedExchange(BackendExchange):
    """Notes when its exchanges of the graph that it was made in begin and end.

    Args:
        number: Of the step: the first sum then fails on every rank where one of them is
            not finite on any (``collective.training.step.finite``).
    """

    def __init__(self, backend: Backend, number: tf.Tensor | None = None):
        super().__init__(backend)
        self._number = number
        self._graph = tf.compat.v1.get_default_graph()
        self._start: tf.Tensor | None = None
        self._stop: tf.Tensor | None = None

    def reduce(
        self,
        kind: str,
        tensors: Sequence[tf.Tensor],
        scattered: Sequence[tf.Tensor] = (),
    ) -> list[tf.Tensor]:
        """As ``Exchange``."""
        if tf.compat.v1.get_default_graph() is not self._graph:  # in a loop or branch
            return super().reduce(kind, tensors, scattered)
        if self._start is None:
            with tf.control_dependencies([*tensors, *scattered]):
                self._start = now()
            if self._backend.overlaps:
                run_independently(self._start)  # a bucket would wait for all gradients
            else:
                with tf.control_dependencies([self._start]):
                    tensors = [tf.identity(t) for t in tensors]
        number = self._number
        if kind == "sum":
            self._number = None
        if number is None or kind != "sum":
            results = super().reduce(kind, tensors, scattered)
        else:
            located = self._located([*scattered, *tensors])
            results = super().reduce(kind, [located, *tensors], scattered)
            place, *results = results
            with tf.control_dependencies(finite.check(place, number, self._backend)):
                results = [tf.identity(t) for t in results]
        with tf.control_dependencies([self._start, *results]):
            self._stop = now()
        return results

    def _located(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """In this replica's place, which of its tensors is the first that is not finite."""
        numbers = [t if t.dtype.is_floating else tf.zeros([]) for t in tensors]
        return finite.at_replica(finite.first(numbers), self._backend)

    def span(self) -> tuple[tf.Tensor, tf.Tensor]:
        """When the first began and the last ended: float64, seconds since 1970."""
        if self._start is None or self._stop is None:
            moment = now()
            return moment, moment
        return self._start, self._stop


def _carrier(dtype: tf.DType) -> tf.DType:
    """The dtype in which values of another travel exactly."""
    if dtype in _NARROW:
        return tf.float32
    if dtype.is_integer or dtype.is_bool:
        return tf.int64
    return {tf.complex64: tf.float32, tf.complex128: tf.float64}.get(dtype, dtype)


def _carried(tensor: tf.Tensor, carrier: tf.DType) -> tf.Tensor:
    if tensor.dtype.is_complex:
        return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
    if tensor.dtype == tf.uint64:
        return tf.bitcast(tensor, tf.int64)
    return tf.cast(tensor, carrier)


def _arrived(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype.is_complex:
        return tf.complex(tensor[..., 0], tensor[..., 1])
    if dtype == tf.uint64:
        return tf.bitcast(tensor, tf.uint64)
    return tf.cast(tensor, dtype)
