"""The devices of one process: each makes its rows' part, and has a copy of what is whole.

The emitted graph is one for all devices, outside of the strategy's replicas: so it may sum
in a loop or a branch, too. What is whole is made on each device where variables have a copy
there, else once. Between devices TensorFlow sends what an operation needs; sums are the
strategy's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import LocalDevices
from collective.training import keras_compat
from collective.training.input.pipeline import Batch
from collective.training.partition.exchange import REDUCE, TimedExchange
from collective.training.step import finite
from collective.training.step.clock import now
from collective.training.step.inputs import ReplicaRows, process_rows, replica_rows


def tracing(model: keras.Model, backend: Backend) -> Any:
    """Around the trace of a method: variables are those of the first device."""
    if isinstance(backend, LocalDevices):
        return keras_compat.first_copy(model, backend.strategy)
    return contextlib.nullcontext()


def rows_of_process(backend: Backend, batch: Batch) -> tuple[tf.Tensor, ReplicaRows]:
    """The number of its first replica, int64 scalar, and all rows of this process."""
    if isinstance(backend, LocalDevices):
        return tf.constant(0, tf.int64), process_rows(batch, 0)
    replica = tf.cast(backend.replica(), tf.int64)
    return replica, replica_rows(backend, batch, replica)


def rows_of_replicas(
    backend: Backend, batch: Batch
) -> Iterator[tuple[tf.Tensor, ReplicaRows]]:
    """The same of each replica of this process, one after the other, on its device."""
    if not isinstance(backend, LocalDevices):
        yield rows_of_process(backend, batch)
        return
    for number in backend.on_each_device():
        replica = tf.constant(number, tf.int64)
        yield replica, replica_rows(backend, batch, replica)


def exchange_of(backend: Backend, number: tf.Tensor | None = None) -> TimedExchange:
    """The exchange of a step on a backend; see ``TimedExchange``."""
    if isinstance(backend, LocalDevices):
        return DeviceExchange(backend, number)
    return TimedExchange(backend, number)


class DeviceExchange(TimedExchange):
    """Between the devices of the only process; arguments as of ``TimedExchange``."""

    def __init__(self, backend: LocalDevices, number: tf.Tensor | None = None):
        super().__init__(backend, number)
        self._local = backend
        self.devices = backend.devices
        self.copies_variables = backend.own_copies

    def copies(self, variable: tf.Variable) -> list[tf.Tensor]:
        """The handles of a variable on each device, or the one of all."""
        return [copy.handle for copy in keras_compat.copies(variable)]

    def reduce(self, kind: str, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors: there is no other process."""
        return list(tensors)

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor."""
        return tensor

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor."""
        return tensor

    def reduce_devices(
        self, kind: str, columns: Sequence[Sequence[tf.Tensor]]
    ) -> list[list[tf.Tensor]]:
        """As ``Exchange``."""
        if tf.compat.v1.get_default_graph() is not self._graph:  # in a loop or branch
            return self._reduced(kind, columns)
        if self._start is None:
            with tf.control_dependencies([t for column in columns for t in column]):
                self._start = now()
        totals = self._reduced(kind, columns)
        if kind == "sum" and self._number is not None:
            places = tf.stack([self._first_not_finite(column) for column in columns])
            with tf.control_dependencies(
                finite.check(places, self._number, self._backend)
            ):
                totals = [self._again(total) for total in totals]
            self._number = None
        with tf.control_dependencies([t for total in totals for t in total]):
            self._stop = now()
        return totals

    def _reduced(
        self, kind: str, columns: Sequence[Sequence[tf.Tensor]]
    ) -> list[list[tf.Tensor]]:
        if kind != "sum":
            rows = zip(*columns, strict=True)
            return [[REDUCE[kind](tf.stack(row), axis=0)] for row in rows]
        totals: dict[int, list[tf.Tensor]] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in columns[0]):
            places = [i for i, t in enumerate(columns[0]) if t.dtype == dtype]
            mine = [[column[i] for i in places] for column in columns]
            totals |= zip(places, self._summed(dtype, mine), strict=True)
        return [totals[place] for place in sorted(totals)]

    def _summed(
        self, dtype: tf.DType, columns: Sequence[Sequence[tf.Tensor]]
    ) -> list[list[tf.Tensor]]:
        """The sums of tensors of one dtype, as ``reduce_devices``."""
        if dtype.is_floating and len(columns) > 1:
            return self._local.sum_devices(columns)
        return [[tf.add_n(row)] for row in zip(*columns, strict=True)]

    def _again(self, total: list[tf.Tensor]) -> list[tf.Tensor]:
        """The same tensors, behind what they have to wait for."""
        if len(total) == 1:
            return [tf.identity(total[0])]
        found = []
        for device, tensor in zip(self.devices, total, strict=True):
            with tf.device(device):
                found.append(tf.identity(tensor))
        return found
