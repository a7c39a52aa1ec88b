"""What code in a forward pass can ask of the replica that it is traced for.

Ranks match the collectives of a graph by their order (MPI) or by their number in it
(``native``, Horovod). The forward and the backward pass trace the same code on every
rank, so that both agree; and each collective here waits for the one before it, because
an executor of graphs runs independent operations in any order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from collective.backends.base import Backend
from collective.training.input.plan import share
from collective.training.step.forward import Sums
from collective.training.step.found import Found
from collective.training.step.rows import at_least_one_row


@dataclass(eq=False)
class ReplicaContext:
    """One replica in one forward pass, inside ``Backend.run``."""

    backend: Backend
    number: tf.Tensor  # int64 scalar, the replica's number
    rows: tf.Tensor  # int64 scalar, rows of the replica; may be 0
    global_rows: tf.Tensor  # int64 scalar, rows of the global batch
    # Whether ``rows`` may be 0. The pass then has one row made up instead
    # (``for_replica``), which must count nowhere.
    maybe_empty: bool
    # ids of the layers that are computed on the rows of all replicas.
    whole_layers: frozenset[int] = field(default=frozenset(), init=False)
    _before: list[tf.Operation] = field(default_factory=list, init=False)

    @property
    def replicas(self) -> int:
        """How many there are."""
        return self.backend.replicas

    @property
    def first_row(self) -> tf.Tensor:
        """int64 scalar: place of the replica's first row in the global batch."""
        return share(self.global_rows, self.number, self.replicas)[0]

    @property
    def share(self) -> tf.Tensor:
        """float64 scalar: the part of what each replica has once, as it is summed."""
        return tf.cast(self.rows / self.global_rows, tf.float64)

    def own(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor; zeros on a replica without rows, whatever its row made up gave."""
        if not self.maybe_empty:
            return tensor
        return tf.where(self.rows > 0, tensor, tf.zeros_like(tensor))

    def of_whole(self, gradient: tf.Tensor) -> tf.Tensor:
        """A gradient of this replica's loss, as that of its part of the global loss."""
        return gradient  # a loss is a sum over replicas

    def of_part(self, gradient: tf.Tensor) -> tf.Tensor:
        """The reverse of ``of_whole``."""
        return gradient

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sum of each tensor over replicas. Differentiable.

        The gradient of a sum over replicas is the sum of the replicas' gradients: what
        each replica's loss owes to this replica's tensor.

        Args:
            tensors: Dense, of the same shapes and dtypes on every replica.

        Returns:
            The sums, in order, the same bits on every replica.
        """
        if self.replicas == 1:
            return list(tensors)

        @tf.custom_gradient
        def summed(*tensors: tf.Tensor) -> Any:
            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
                return self.all_reduce([self.own(u) for u in upstream])

            return self._in_order(tensors), gradient

        return tf.nest.flatten(summed(*tensors))

    def _in_order(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums after the collective before this one in the same graph."""
        if tf.executing_eagerly():  # in the order of the program
            return self.backend.all_reduce(tensors)
        graph = tf.compat.v1.get_default_graph()
        before = [op for op in self._before if op.graph is graph]
        with tf.control_dependencies(before):
            waiting = [tf.identity(t) for t in tensors]
        sums = self.backend.all_reduce(waiting)
        self._before = [t.op for t in sums]
        return sums


_entered = threading.local()  # in-process strategies trace each replica in a thread


@contextlib.contextmanager
def entered(context: ReplicaContext | None) -> Iterator[None]:
    """Inside, code is traced for this replica."""
    before, _entered.context = current(), context
    try:
        yield
    finally:
        _entered.context = before


def current() -> ReplicaContext | None:
    """The replica whose forward pass is being traced; None outside of one."""
    return getattr(_entered, "context", None)


def for_replica(
    run: Callable[[ReplicaContext, Any], tuple[Sums, Found]],
    backend: Backend,
    rows: Any,
    count: tf.Tensor,
    global_rows: tf.Tensor,
    maybe_empty: bool,
) -> tuple[Sums, Found]:
    """A pass over the rows of the replica that is being traced, inside ``Backend.run``.

    Args:
        run: Takes the replica and rows; returns sums, and what the trace has found.
        rows: Tree of tensors ``[n, ...]``.

    Returns:
        What it returns. Without rows, all sums are zero but the metrics: these may be
        those of the whole global batch, and code that sums own rows calls ``own``.
    """
    number = tf.cast(backend.replica(), tf.int64)
    context = ReplicaContext(backend, number, count, global_rows, maybe_empty)
    with entered(context):
        sums, found = run(
            context, at_least_one_row(rows, count) if maybe_empty else rows
        )
    if maybe_empty:
        own: Sums = tf.nest.map_structure(context.own, sums)
        sums = own._replace(metrics=sums.metrics)
    return sums, found
