"""Collectives across processes: sums, gathers and first values, over any backend.

It is a ``tf.distribute.CrossDeviceOps``, TensorFlow's public interface for this
purpose. TensorFlow sums the values of this process' devices, and the backend those
sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import ShardCollectives
from collective.distribute import tf_internal
from collective.distribute.collective_order import Order
from collective.errors import UsageError
from collective.tensorflow_ops.text import gather_strings

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


class BackendCrossDeviceOps(tf.distribute.CrossDeviceOps):
    """Collectives over the local devices of all processes.

    Args:
        backend: A backend with processes (native, mpi, horovod), or of one process.
    """

    def __init__(self, backend: Backend):
        super().__init__()
        self.backend = backend
        self._order = Order(backend)

    @property
    def _num_between_graph_workers(self) -> int:  # so the base class takes no shortcut
        return self.backend.size

    def reduce_implementation(
        self,
        reduce_op: tf.distribute.ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: Any,
    ) -> Any:
        """Reduce one value as TensorFlow's method does."""
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value_destination_pairs: Any,
        options: Any,
    ) -> list[Any]:
        """Reduce dense values in one all-reduce, and ``IndexedSlices`` by gathers."""
        pairs = list(value_destination_pairs)
        replicas = self.backend.size * len(pairs[0][0].values)
        values = [_local_sum(value) for value, _ in pairs]
        dense = [i for i, v in enumerate(values) if not _is_sparse(v)]
        for i, total in zip(dense, self.sum([values[i] for i in dense]), strict=True):
            values[i] = total
        for i, value in enumerate(values):
            if _is_sparse(value):
                values[i] = tf.IndexedSlices(
                    self.gather(value.values, 0),
                    self.gather(value.indices, 0),
                    value.dense_shape,
                )
            if reduce_op == MEAN:
                values[i] = _divided(values[i], replicas)
        return [
            self.broadcast(value, destinations)
            for value, (_, destinations) in zip(values, pairs, strict=True)
        ]

    def _gather_implementation(
        self, per_replica_value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        local = per_replica_value.values
        mine = local[0] if len(local) == 1 else tf.concat(local, axis)
        return self.broadcast(self.gather(mine, axis), destinations)

    # The collectives have no gradients: ``ReplicaContext`` adds those.

    def sum(self, tensors: Sequence[Any]) -> list[tf.Tensor]:
        """Return the sum of each tensor over the processes."""
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if not tensors or self.backend.size == 1:
            return tensors
        _refuse_xla()
        sizes = ", ".join(str(tensor.shape) for tensor in tensors[:3])
        return self._order.run(
            f"a sum of {len(tensors)} tensors {sizes}", tensors, self.backend.all_reduce
        )

    def from_rank_zero(self, value: tf.Tensor) -> tf.Tensor:
        """Return rank 0's value on every process; shapes and dtypes agree."""
        if self.backend.size == 1:
            return value
        if value.dtype == tf.string:
            mine = tf.reshape(value, [-1])
            first = self._gather_strings(mine[: 0 if self.backend.rank else None])
            return tf.reshape(first, tf.shape(value))
        if tf.executing_eagerly():
            name = f"rank 0's value of shape {value.shape}"

            def broadcast(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
                array = self.backend.broadcast_array(tensors[0].numpy())
                return [tf.constant(array, value.dtype)]

            return self._order.run(name, [value], broadcast)[0]
        through = tf.uint8 if value.dtype == tf.bool else value.dtype
        sent = tf.cast(value, through)
        total = self.sum([tf.zeros_like(sent) if self.backend.rank else sent])[0]
        return tf.cast(total, value.dtype)

    def gather(self, tensor: Any, axis: int) -> tf.Tensor:
        """Concatenate along an axis; lengths may differ between processes."""
        tensor = tf.convert_to_tensor(tensor)
        if self.backend.size == 1:
            return tensor
        if tensor.dtype == tf.string:
            return self._gather_whole_strings(tensor, axis)
        _refuse_xla()
        through = tf.uint8 if tensor.dtype == tf.bool else tensor.dtype
        rows = tf.cast(_axis_first(tensor, axis), through)
        backend = self.backend
        if not isinstance(backend, ShardCollectives):
            raise UsageError(
                f"backend {backend.name!r} cannot gather", hint="backend native or mpi"
            )

        def gather_rows(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            return [backend.gather_rows(tensors[0])]

        name = f"a gather along axis {axis} of {tensor.shape.rank} axes"
        whole = self._order.run(name, [rows], gather_rows)[0]
        whole = tf.ensure_shape(whole, [None, *rows.shape[1:]])
        return tf.cast(_axis_back(whole, axis), tensor.dtype)

    def _gather_whole_strings(self, tensor: tf.Tensor, axis: int) -> tf.Tensor:
        return _axis_back(self._gather_strings(_axis_first(tensor, axis)), axis)

    def _gather_strings(self, strings: tf.Tensor) -> tf.Tensor:
        return gather_strings(strings, lambda numbers: self.gather(numbers, 0))


def _is_sparse(value: Any) -> bool:
    return isinstance(value, tf.IndexedSlices)


def _local_sum(value: Any) -> Any:
    """Return the sum over the devices of this process."""
    values = value.values
    if len(values) == 1:
        return values[0]
    return tf_internal.reduce_local_values(value, values[0].device, tf.add_n, SUM)


def _divided(value: Any, by: int) -> Any:
    if _is_sparse(value):
        return tf.IndexedSlices(
            _divided(value.values, by), value.indices, value.dense_shape
        )
    return value / tf.cast(by, value.dtype)  # of integers: float64, as in TensorFlow


def _axis_first(tensor: tf.Tensor, axis: int) -> tf.Tensor:
    order = _order_with_first(tensor, axis)
    return tensor if axis == 0 else tf.transpose(tensor, order)


def _axis_back(tensor: tf.Tensor, axis: int) -> tf.Tensor:
    order = np.argsort(_order_with_first(tensor, axis))
    return tensor if axis == 0 else tf.transpose(tensor, order)


def _order_with_first(tensor: tf.Tensor, axis: int) -> list[int]:
    axes = list(range(tensor.shape.rank))
    return [axes.pop(axis), *axes]


def _refuse_xla() -> None:
    if tf_internal.is_compiled_by_xla():
        raise UsageError(
            "XLA cannot compile a collective of several processes",
            hint="leave jit_compile=True out of the tf.function around strategy.run; a "
            "function of one replica without collectives may have it",
        )
