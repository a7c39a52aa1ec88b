"""The sums and gathers of a step: everything that one replica learns of the others.

Emitted graphs know no backend. They ask an ``Exchange``, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import ShardCollectives
from collective.tensorflow_ops.ranks import run_independently
from collective.training.step import finite
from collective.training.step.clock import now
from collective.training.step.reduction import sum_tensors

#: By the kind of a partial value: the operation that makes it whole.
REDUCE = {
    "max": tf.reduce_max,
    "min": tf.reduce_min,
    "prod": tf.reduce_prod,
    "any": tf.reduce_any,
    "all": tf.reduce_all,
}
_NARROW = (tf.float16, tf.bfloat16, tf.float32)


class Exchange(Protocol):
    """What an emitted graph asks of the other ranks, inside of the graph.

    Attributes:
        devices: Of this process, where it has several: its replicas are shared out over
            them, in order.
        copies_variables: Whether each device has a copy of every variable.
    """

    devices: Sequence[str]
    copies_variables: bool

    def reduce(self, kind: str, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sum (maximum, ...) of each tensor over all ranks.

        Args:
            kind: sum, max, min, prod, any or all.
            tensors: Of the same shapes and dtypes on every rank.
        """
        ...

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensors of all ranks along the first axis, in the order of the ranks."""
        ...

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """Rank 0's tensor, of the same shape and dtype on every rank."""
        ...

    def copies(self, variable: tf.Variable) -> list[tf.Tensor]:
        """The handles of a variable on each device, or the one of all."""
        ...

    def reduce_devices(
        self,
        kind: str,
        columns: Sequence[Sequence[tf.Tensor]],
        more: Sequence[tf.Tensor] = (),
    ) -> list[list[tf.Tensor]]:
        """As ``reduce``: a list for each tensor, with one for all or for each device.

        Args:
            columns: Of each device its tensors.
            more: Tensors of this process.
        """
        ...


class OnOneDevice:
    """Of an exchange: all replicas of a process are on the same device."""

    devices: Sequence[str] = ()
    copies_variables = False

    def copies(self, variable: tf.Variable) -> list[tf.Tensor]:
        """The handle of the variable."""
        return [variable.handle]

    def reduce_devices(
        self,
        kind: str,
        columns: Sequence[Sequence[tf.Tensor]],
        more: Sequence[tf.Tensor] = (),
    ) -> list[list[tf.Tensor]]:
        """Never called: there is one device."""
        raise NotImplementedError


class OneProcess(OnOneDevice):
    """An exchange with nobody: all replicas are in this process."""

    def reduce(self, kind: str, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors."""
        return list(tensors)

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor."""
        return tensor

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor."""
        return tensor


class BackendExchange(OnOneDevice):
    """Sums by a backend; everything else is made of sums, or of its gather."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def reduce(self, kind: str, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As ``Exchange``. Sums travel in one message for each dtype."""
        if kind != "sum":
            return [REDUCE[kind](self.gather(t[None]), axis=0) for t in tensors]
        results = list(tensors)
        by_dtype: dict[tf.DType, list[int]] = {}
        for place, tensor in enumerate(tensors):
            by_dtype.setdefault(_carrier(tensor.dtype), []).append(place)
        for carrier, places in by_dtype.items():
            sent = [_carried(tensors[i], carrier) for i in places]
            sums = sum_tensors(self._backend, sent, [])
            for i, summed in zip(places, sums, strict=True):
                results[i] = _arrived(summed, tensors[i].dtype)
        return results

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """As ``Exchange``, of any dtype that can be summed."""
        sent = _carried(tensor, _carrier(tensor.dtype))
        assert isinstance(self._backend, ShardCollectives)
        return _arrived(self._backend.gather_rows(sent), tensor.dtype)

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

    def reduce(self, kind: str, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As ``Exchange``."""
        if tf.compat.v1.get_default_graph() is not self._graph:  # in a loop or branch
            return super().reduce(kind, tensors)
        if self._start is None:
            with tf.control_dependencies(tensors):
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
            results = super().reduce(kind, tensors)
        else:
            *results, place = super().reduce(kind, [*tensors, self._located(tensors)])
            with tf.control_dependencies(finite.check(place, number, self._backend)):
                results = [tf.identity(t) for t in results]
        with tf.control_dependencies([self._start, *results]):
            self._stop = now()
        return results

    def _located(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """In this replica's place, which of its tensors is the first that is not finite."""
        return finite.at_replica(self._first_not_finite(tensors), self._backend)

    def _first_not_finite(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        numbers = [t if t.dtype.is_floating else tf.zeros([]) for t in tensors]
        return finite.first(numbers)

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
