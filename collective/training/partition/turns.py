"""The pieces of a rank's rows take turns, so that only one is in memory at a time.

Nothing in a graph says that the second micro-batch begins when the first has ended, and
TensorFlow runs whatever is ready: all of them at once. Here what is made for a piece waits
for what was made for the piece before it on the same device.

Where rows meet, every piece has to arrive before any can go on. So turns are taken between
two such points: ``end`` is called at each. What a piece has made before it, and reads after
it, stays in memory meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import tensorflow as tf

from collective.training.keras_compat.tensorflow_names import wait_for
from collective.training.partition.copies import first_replicas
from collective.training.partition.graph import Node


class Turns:
    """The turns of the replicas of one emitted graph.

    All that is made for a replica between two meetings waits for an operation of its own,
    its gate; and the gate for what the replica before has made last. This is never a
    circle: between two meetings a replica reads nothing of a later one.

    Args:
        replicas: Of this process.
        devices: Over which they are shared out; those of one device take turns.

    Attributes:
        nodes: Those that were made for each replica since the last end.
    """

    def __init__(self, replicas: int, devices: int = 1):
        firsts = first_replicas(replicas, max(devices, 1))
        self._waits = [replica not in firsts for replica in range(replicas)]
        self._made: list[list[tf.Operation]] = [[] for _ in range(replicas)]
        self._gates: dict[int, tf.Operation] = {}
        self.nodes: set[Node] = set()

    def of(self, replica: int) -> contextlib.AbstractContextManager[None]:
        """Surround what is made for a replica."""
        if not self._waits[replica]:
            return contextlib.nullcontext()
        if replica not in self._gates:
            with tf.control_dependencies(None):
                self._gates[replica] = tf.no_op()
        return tf.control_dependencies([self._gates[replica]])

    def made(self, ops: Iterable[Iterable[tf.Operation]]) -> None:
        """Note what was made for each replica, for which the next one waits."""
        for found, of_replica in zip(self._made, ops, strict=False):
            found += of_replica

    def adds(self, parts: Sequence[tf.Tensor], sums: Sequence[tf.Tensor]) -> None:
        """Note what adds up the parts of all replicas: each sum is its last part's.

        So the next replica begins when the part before it is added, and not kept.
        """
        if len(parts) != len(self._made) or not any(self._waits):
            return
        replicas = {part.ref(): replica for replica, part in enumerate(parts)}

        def last_of(tensor: tf.Tensor) -> int:
            """Return the last replica whose part is in a tensor; -1 for a constant."""
            if tensor.ref() not in replicas:
                last = max(map(last_of, tensor.op.inputs), default=-1)
                replicas[tensor.ref()] = last
                if last >= 0:
                    self._made[last].append(tensor.op)
            return replicas[tensor.ref()]

        for total in sums:
            last_of(total)

    def end(self) -> None:
        """Have each replica wait for the one before it; new turns begin."""
        for replica, gate in self._gates.items():
            wait_for(gate, _last(self._made[replica - 1]))
        self._gates = {}
        self._made = [[] for _ in self._made]
        self.nodes = set()


def _last(ops: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Return the operations that no other of them reads."""
    read = {tensor.op for op in ops for tensor in op.inputs}
    return [op for op in dict.fromkeys(ops) if op not in read]
