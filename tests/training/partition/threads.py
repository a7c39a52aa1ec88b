"""All ranks of a mesh in one graph, each emitted by a thread as a rank would emit its own.

The threads take turns: one runs until it comes to a collective, and hands its tensor to the
others of its group. So a collective is plain arithmetic on the tensors of all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from collective.training.keras_compat.tensorflow_names import wait_for
from collective.training.partition import pieces
from collective.training.partition.backend_exchange import exchanged
from collective.training.partition.exchange import Message, OnOneDevice, Opens
from collective.training.partition.markers import FIRST, GATHER, Marker
from collective.training.partition.own import REDUCE

_SECONDS = 60  # a rank waits for the others
_turn = threading.Lock()  # held by the thread that runs


class Group:
    """What some threads hand to each other, call by call."""

    def __init__(self, size: int):
        self.size = size
        self.calls: list[str] = []
        self._barrier = threading.Barrier(size)
        self._given: list[Any] = [None] * size

    def swap(self, place: int, name: str, value: Any) -> list[Any]:
        """The values of all ranks, which must call the same."""
        self._given[place] = name, value
        self._wait()
        found = list(self._given)
        self._wait()
        names = {given for given, _ in found}
        if len(names) > 1:
            raise AssertionError(f"ranks call different collectives: {names}")
        if not place:
            self.calls.append(name)
        return [value for _, value in found]

    def _wait(self) -> None:
        _turn.release()
        try:
            self._barrier.wait(_SECONDS)
        finally:
            _turn.acquire()

    def leave(self) -> None:
        """Has the other ranks fail, which wait for this one."""
        self._barrier.abort()


def _open(gates: Sequence[tf.Operation], sent: tf.Tensor) -> None:
    """Have what waits for a value to be sent go on behind it."""
    for gate in gates:
        wait_for(gate, [sent.op])


class ThreadExchange(OnOneDevice):
    """The exchange of a thread over one axis of the mesh.

    Args:
        group: Of the ranks along the axis.
        place: This rank's number in it.
        axes: By name of another axis: the exchange along it.
    """

    def __init__(
        self, group: Group, place: int, axes: dict[str, ThreadExchange] | None = None
    ):
        self.group, self._number, self._axes = group, place, axes or {}

    @property
    def place(self) -> tuple[int, int]:
        """See ``Exchange``."""
        return self._number, self.group.size

    def _all(self, tensor: tf.Tensor, what: str) -> list[tf.Tensor]:
        shape = tensor.shape.as_list()[what == GATHER :]
        name = f"{what} {tensor.dtype.name} {shape}"
        return self.group.swap(self._number, name, tensor)

    def reduce(self, message: Message) -> list[tf.Tensor]:
        """See ``Exchange``."""
        made: list[tf.Tensor] = []
        kind, count = message.kind, len(message.values)
        for own in [*message.values, *message.scattered]:
            with tf.control_dependencies(made[-1:]):
                sent = tf.identity(own.parts[0])
            made.append(REDUCE[kind](tf.stack(self._all(sent, kind)), 0))
            _open(own.opens, made[-1])
        cut = [pieces.cut(total, *self.place) for total in made[count:]]
        return [*made[:count], *cut]

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """See ``Exchange``."""
        return tf.concat(self._all(tensor, GATHER), 0)

    def join(
        self, own: Sequence[tf.Tensor], shapes: Sequence[Any], opens: Opens = ()
    ) -> list[tf.Tensor]:
        """See ``Exchange``."""
        made: list[tf.Tensor] = []
        for piece, shape in zip(own, shapes, strict=True):
            with tf.control_dependencies(made[-1:]):
                made.append(tf.reshape(self.gather(piece), shape))
        for gates, whole in zip(opens, made, strict=False):
            _open(gates, whole)
        return made

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """See ``Exchange``."""
        return self._all(tensor, FIRST)[0]

    def of_marker(
        self, marker: Marker, op: tf.Operation, tensors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """See ``Exchange``."""
        return exchanged(self._axes[marker.axis], marker, tensors)


def together(calls: Sequence[Callable[[], Any]], groups: Sequence[Group]) -> list[Any]:
    """Calls functions in turns; their results."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []
    graph: Any = tf.compat.v1.get_default_graph()
    graph.switch_to_thread_local()

    def run(number: int) -> None:
        with _turn, graph.as_default():
            try:
                results[number] = calls[number]()
            except BaseException as error:
                errors.append(error)
                for group in groups:
                    group.leave()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
