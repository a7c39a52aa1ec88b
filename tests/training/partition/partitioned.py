"""A function partitioned over several replicas that are all in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from collective.training.partition.emission import Traffic
from collective.training.partition.exchange import OneProcess
from collective.training.partition.graph import Graph, Node
from collective.training.partition.layouts import ROWS, WHOLE
from collective.training.partition.partition import Partition
from collective.training.partition.plans import Rows
from collective.training.partition.shares import Share


class Partitioned:
    """A function of tensors, traced unchanged and emitted again for the rows of replicas.

    Args:
        function: Returns a list of tensors.
        arguments: Arrays, as an example of its arguments.
        has_rows: For each argument, whether its first axis is the batch.
        replicas: Number of replicas.
        is_static: Whether it is traced for batches of this one length.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[tf.Tensor]],
        arguments: Sequence[np.ndarray],
        has_rows: Sequence[bool],
        *,
        replicas: int,
        is_static: bool = False,
    ):
        self.has_rows, self.replicas = list(has_rows), replicas
        specs = []
        for array, rows in zip(arguments, has_rows, strict=True):
            shape = list(np.shape(array))
            if rows and not is_static:
                shape[0] = None
            specs.append(tf.TensorSpec(shape, tf.as_dtype(np.asarray(array).dtype)))
        self.stock = tf.function(
            lambda *x: [tf.identity(t) for t in function(*x)], autograph=False
        ).get_concrete_function(*specs)
        length = self._length(arguments)
        rows = Rows(length, length) if is_static else Rows.unknown(length)
        layouts = [ROWS if rows else WHOLE for rows in has_rows]
        self.partition = Partition(self.stock, layouts, rows)
        self.traffic = Traffic()
        self._emitted = tf.function(self._emit, autograph=False).get_concrete_function(
            tf.TensorSpec([replicas], tf.int64), *specs
        )

    def _length(self, arguments: Sequence[np.ndarray]) -> int:
        return next(
            len(a) for a, rows in zip(arguments, self.has_rows, strict=True) if rows
        )

    def _emit(self, counts: tf.Tensor, *arguments: tf.Tensor) -> list[tf.Tensor]:
        ends = tf.cumsum(counts)
        fields = [(ends[i] - counts[i], counts[i]) for i in range(self.replicas)]
        share = Share.of(
            ends[-1],
            [(first, own, tf.constant(not i)) for i, (first, own) in enumerate(fields)],
        )
        parts = [
            [x[first : first + own] for first, own in fields] if rows else [x]
            for x, rows in zip(arguments, self.has_rows, strict=True)
        ]
        made, _ = self.partition.emit(parts, share, OneProcess(), self.traffic)
        return [tensors[0] for tensors in made]

    def __call__(
        self, counts: Sequence[int], arguments: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return the outputs, with so many rows on each replica."""
        assert sum(counts) == self._length(arguments)
        made = self._emitted(tf.constant(counts, tf.int64), *map(_tensor, arguments))
        return [t.numpy() for t in made]

    def whole(self, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the outputs of the traced function, without the partition."""
        return [t.numpy() for t in self.stock(*map(_tensor, arguments))]

    @property
    def fallbacks(self) -> list[str]:
        """Return the types of operations that gathered rows because no rule applied."""
        return sorted(
            {
                node.type
                for node in _nodes(self.partition.graph)
                if node.plan.is_fallback and any(v.layout != WHOLE for v in node.inputs)
            }
        )

    @property
    def types(self) -> set[str]:
        """Return the types of all operations, including loops and branches."""
        return {node.type for node in _nodes(self.partition.graph)}


def _tensor(array: Any) -> tf.Tensor:
    return tf.constant(array)


def _nodes(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        yield node
        for body in node.bodies:
            yield from _nodes(body)


def cut(rng: np.random.Generator, rows: int, replicas: int) -> list[int]:
    """Return the number of rows of each replica; some may have none."""
    ends = np.sort(rng.integers(0, rows + 1, replicas - 1))
    return [int(n) for n in np.diff([0, *ends, rows])]


def assert_same(
    want: Sequence[Any], got: Sequence[Any], names: Sequence[str], tolerance: float
) -> None:
    """Fail with the name of the first output that differs."""
    for a, b, name in zip(want, got, names, strict=True):
        assert a.shape == b.shape, f"{name}: {b.shape} where {a.shape} is right"
        if a.dtype.kind in "OSU":
            assert (a == b).all(), name
            continue
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(
            b.astype(wide), a.astype(wide), tolerance, tolerance, err_msg=name
        )
