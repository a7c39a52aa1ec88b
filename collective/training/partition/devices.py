"""The devices of one process: each makes its rows' part, and has a copy of what is whole.

The emitted graph is one for all devices, outside of the strategy's replicas: so it may sum
in a loop or a branch, too. What is whole is made on each device where variables have a copy
there, else once. Between devices TensorFlow sends what an operation needs; sums are the
strategy's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import LocalDevices, ShardCollectives
from collective.training import keras_compat
from collective.training.partition.backend_exchange import (
    BackendExchange,
    OneOrderedProcess,
)
from collective.training.partition.copies import of_device
from collective.training.partition.exchange import (
    Exchange,
    Message,
    OneProcess,
    Values,
)
from collective.training.partition.own import REDUCE, Own, combined, first_not_finite
from collective.training.partition.timed_exchange import TimedExchange
from collective.training.step import finite
from collective.training.step.clock import now
from collective.training.virtual.pieces import VirtualReplicas


def on_first(
    model: keras.Model, backend: Backend
) -> contextlib.AbstractContextManager[object]:
    """Inside, variables are those of the first device, and no strategy is there."""
    if isinstance(backend, LocalDevices):
        return keras_compat.one_copy.first_copy(model, backend.strategy)
    return contextlib.nullcontext()


def supports(backend: Backend) -> bool:
    """Return whether a backend has what a partitioned step exchanges."""
    if isinstance(backend, LocalDevices):
        return True
    if len(backend.local_replicas) != 1 or not backend.synchronous:
        return False
    exchanges = isinstance(backend, ShardCollectives) and backend.size > 1
    return exchanges or (backend.replicas == 1 and backend.size == 1)


def exchange_of(
    backend: Backend,
    number: tf.Tensor | None = None,
    virtual: VirtualReplicas | None = None,
    axes: Mapping[str, Exchange] | None = None,
) -> TimedExchange:
    """Return the exchange of a step on a backend; see ``TimedExchange``."""
    if isinstance(backend, LocalDevices):
        return DeviceExchange(backend, number, virtual)
    return TimedExchange(backend, number, virtual, axes)


class DeviceExchange(TimedExchange):
    """Between the devices of each process, and between processes; as ``TimedExchange``."""

    def __init__(
        self,
        backend: LocalDevices,
        number: tf.Tensor | None = None,
        virtual: VirtualReplicas | None = None,
    ):
        super().__init__(backend, number)
        self._local = backend
        self.devices = backend.devices
        self.copies_variables = backend.own_copies
        between = backend.between
        self._processes: Exchange
        if between is not None:
            self._processes = BackendExchange(between, virtual)
        elif virtual is not None:
            self._processes = OneOrderedProcess(virtual)
        else:
            self._processes = OneProcess()
        self.tree = getattr(self._processes, "tree", None)

    def copies(self, variable: tf.Variable) -> list[tf.Tensor]:
        """Return the handles of a variable on each device, or the one of all."""
        return [copy.handle for copy in keras_compat.one_copy.copies(variable)]

    def added(self, kind: str, parts: Sequence[tf.Tensor]) -> Own:
        """See ``Exchange``. Each device has one part; all parts if a tree adds them."""
        count, dtype = len(self.devices), parts[0].dtype
        if self.tree is not None or len(parts) == 1:
            return Own(parts, dtype)
        found = []
        for number, device in enumerate(self.devices):
            with tf.device(device):
                found.append(combined(kind, of_device(parts, number, count)))
        return Own(found, dtype)

    def reduce(self, message: Message) -> list[tf.Tensor]:
        """Reduce over the processes."""
        return self._processes.reduce(message)

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """See ``Exchange``; gathers what the devices of this process have together."""
        return self._processes.gather(tensor)

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """See ``Exchange``."""
        return self._processes.broadcast(tensor)

    def reduce_devices(
        self,
        kind: str,
        columns: Sequence[Values],
        more: Sequence[tf.Tensor] = (),
    ) -> list[list[tf.Tensor]]:
        """See ``Exchange``."""
        if tf.compat.v1.get_default_graph() is not self._graph:  # in a loop or branch
            return self._reduced(kind, columns, more)
        if self._start is None:
            parts = [t for column in columns for own in column for t in own.parts]
            with tf.control_dependencies(parts):
                self._start = now()
        if kind != "sum" or self._number is None:
            totals = self._reduced(kind, columns, more)
        else:
            more = [*more, self._located_on_devices(columns)]
            *totals, (places,) = self._reduced(kind, columns, more)
            check = finite.check(places, self._number, self._backend)
            self._number = None
            with tf.control_dependencies(check):
                totals = [self._again(total) for total in totals]
        with tf.control_dependencies([t for total in totals for t in total]):
            self._stop = now()
        return totals

    def _located_on_devices(self, columns: Sequence[Values]) -> tf.Tensor:
        """Act like ``_located``, for all replicas of this process."""
        numbers = self._local.local_replicas
        return tf.add_n(
            [
                tf.one_hot(number, self._local.most_replicas) * first_not_finite(column)
                for number, column in zip(numbers, columns, strict=True)
            ]
        )

    def _reduced(
        self, kind: str, columns: Sequence[Values], more: Sequence[tf.Tensor]
    ) -> list[list[tf.Tensor]]:
        if self.tree is not None:  # in the order of pieces, wherever they are
            of_pieces = [
                [part for own in of_one for part in own.parts]
                for of_one in zip(*columns, strict=True)
            ]
            return self._between_processes(kind, [*of_pieces, *([t] for t in more)])
        totals = [*self._between_devices(kind, columns), *([t] for t in more)]
        if self._local.between is None:
            return totals
        return self._between_processes(kind, [[total[0]] for total in totals])

    def _between_processes(
        self, kind: str, values: Sequence[Sequence[tf.Tensor]]
    ) -> list[list[tf.Tensor]]:
        own = [self._processes.added(kind, parts) for parts in values]
        return [[total] for total in self.reduce(Message(kind, own))]

    def _between_devices(
        self, kind: str, columns: Sequence[Values]
    ) -> list[list[tf.Tensor]]:
        of_devices = [[own.parts[0] for own in column] for column in columns]
        if len(of_devices) == 1:
            return [[tensor] for tensor in of_devices[0]]
        rows = list(zip(*of_devices, strict=True))
        if kind != "sum":
            return [[REDUCE[kind](tf.stack(row), axis=0)] for row in rows]
        totals: dict[int, list[tf.Tensor]] = {}
        for dtype in dict.fromkeys(row[0].dtype for row in rows):
            places = [i for i, row in enumerate(rows) if row[0].dtype == dtype]
            if dtype.is_floating:
                sums = self._local.sum_devices(
                    [[column[i] for i in places] for column in of_devices]
                )
            else:
                sums = [[tf.add_n(rows[i])] for i in places]
            totals |= zip(places, sums, strict=True)
        return [totals[place] for place in range(len(rows))]

    def _again(self, total: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the tensors with control dependencies on what they must wait for."""
        if len(total) == 1:
            return [tf.identity(total[0])]
        found = []
        for device, tensor in zip(self.devices, total, strict=True):
            with tf.device(device):
                found.append(tf.identity(tensor))
        return found
