"""The sums and gathers of a step: everything that one replica learns of the others.

Emitted graphs know no backend. They ask an ``Exchange``, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import tensorflow as tf

from collective.training.partition.markers import Marker
from collective.training.partition.own import Own, combined
from collective.training.virtual.tree import Tree

Values = Sequence[Own]
"""For each value, what this process has of it."""
Gradients = Mapping[int, Any]
"""The variable of which a value is the gradient, by the value's index."""
Opens = Sequence[Sequence[tf.Operation]]


@dataclass(frozen=True)
class Message:
    """What this process puts into one reduction over all replicas.

    Args:
        kind: sum, max, min, prod, any or all.
        values: What ``Exchange.added`` made, of the same shapes and dtypes on every rank.
        gradients: Which of them are gradients, whose sums may be rounded.
        scattered: More values, of whose sums this rank gets its piece; see ``pieces``.
    """

    kind: str
    values: Values
    gradients: Gradients = field(default_factory=dict)
    scattered: Values = ()


class Exchange(Protocol):
    """What an emitted graph asks of the other ranks, inside of the graph.

    Attributes:
        devices: Of this process, where it has several: its replicas are shared out over
            them, in order.
        copies_variables: Whether each device has a copy of every variable.
        tree: The order of sums over pieces. If None, they are added in any.
        holds_writes: Whether variables are written when all exchanges are made.
    """

    devices: Sequence[str]
    copies_variables: bool
    tree: Tree | None
    holds_writes: bool

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

    def reduce(self, message: Message) -> list[tf.Tensor]:
        """Return the sum (maximum, ...) of each value over all replicas of all ranks.

        Returns:
            The sums of ``message.values``, then the pieces of ``message.scattered``.
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
        """Return rank 0's tensor: numbers or text, of the same dtype on every rank."""
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
        """Act like ``reduce``; return for each tensor a list of one, or of one for each device.

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
    holds_writes = True

    def copies(self, variable: tf.Variable) -> list[tf.Tensor]:
        """Return the handle of the variable."""
        return [variable.handle]

    def added(self, kind: str, parts: Sequence[tf.Tensor]) -> Own:
        """See ``Exchange``; adds them in their own dtype."""
        return Own([combined(kind, parts)], parts[0].dtype)

    def of_marker(
        self, marker: Marker, op: tf.Operation, tensors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Fail: the mesh has one axis, so this is never called."""
        raise NotImplementedError(marker)

    def reduce_devices(
        self,
        kind: str,
        columns: Sequence[Values],
        more: Sequence[tf.Tensor] = (),
    ) -> list[list[tf.Tensor]]:
        """Fail: there is one device, so this is never called."""
        raise NotImplementedError


class OneProcess(OnOneDevice):
    """The exchange of a job of one process: all replicas are here."""

    place = 0, 1

    def reduce(self, message: Message) -> list[tf.Tensor]:
        """Reduce over the replicas of this process."""
        sums = [own.parts[0] for own in message.values]
        return [*sums, *(tf.reshape(own.parts[0], [-1]) for own in message.scattered)]

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
