"""A function whose variables are cut over a model axis, all replicas in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from collective.training.keras_compat import tensorflow_names
from collective.training.partition import pieces
from collective.training.partition.emission import Traffic
from collective.training.partition.exchange import OneProcess
from collective.training.partition.layouts import OWNED, ROWS, WHOLE, Sharded
from collective.training.partition.mesh.axis import AxisPass
from collective.training.partition.partition import Partition, Placed
from collective.training.partition.plans import Rows
from collective.training.partition.shares import Share
from tests.training.partition.partitioned import _nodes
from tests.training.partition.threads import Group, ThreadExchange, together


class Weight(NamedTuple):
    """A variable, and how it is cut: along an axis, in so many blocks.

    In pieces, it is cut over the axis of the batch besides.
    """

    value: np.ndarray
    axis: int | None = None
    blocks: int = 1
    in_pieces: bool = False

    def layout(self, parts: int) -> Sharded:
        """How it lies over so many ranks."""
        assert self.axis is not None
        size, rest = divmod(self.value.shape[self.axis], parts * self.blocks)
        assert not rest, (self.value.shape, self.axis, parts)
        return Sharded(self.axis, (size,) * self.blocks)


def piece(whole: Any, layout: Sharded, part: int, parts: int) -> np.ndarray:
    """A rank's part of a whole array."""
    begin, found = 0, []
    for block in layout.blocks:
        places = np.arange(begin + part * block, begin + (part + 1) * block)
        found.append(np.take(np.asarray(whole), places, layout.axis))
        begin += parts * block
    return np.concatenate(found, layout.axis)


def joined(pieces: Sequence[Any], layout: Sharded) -> np.ndarray:
    """The whole array of the parts of all ranks."""
    cuts = np.cumsum(layout.blocks)[:-1]
    split = [np.split(np.asarray(p), cuts, layout.axis) for p in pieces]
    by_block = [np.concatenate(of, layout.axis) for of in zip(*split, strict=True)]
    return np.concatenate(by_block, layout.axis)


class OnePass:
    """The pass over a model axis whose ranks are all in this process.

    Args:
        function: What has the ``graph`` of a traced function.
        places: Ranks of the axis.
        cut: By variable: its layout, and the variables with the parts.
        has_rows: Of each argument.
    """

    def __init__(
        self,
        function: Any,
        places: int,
        cut: Sequence[tuple[tf.Variable, Sharded, Sequence[tf.Variable]]],
        has_rows: Sequence[bool],
    ):
        placed = {
            id(variable.handle): Placed(layout, [part.handle for part in parts])
            for variable, layout, parts in cut
        }
        count = len(function.graph.inputs) - len(function.graph.captures)
        whole = [WHOLE] * count
        alike = [place for place, has in enumerate(has_rows) if has]
        self.partition = Partition(
            function, whole, Rows.places(places), None, placed, alike
        )
        self.traffic = Traffic()
        self.graph = tensorflow_names.function_graph_of("model")
        with self.graph.as_default():
            arguments = [
                tf.compat.v1.placeholder(t.dtype, t.shape)
                for t in function.graph.inputs[:count]
            ]
            emission = self.partition.begun(
                [[a] for a in arguments],
                Share.of_places(places, range(places)),
                OneProcess(),
                self.traffic,
            )
            results = emission.run([WHOLE] * len(function.graph.outputs))
            outputs = [tf.identity(result) for (result,) in results]
            effects = emission.effects()
        tensorflow_names.complete(self.graph, arguments, outputs, effects)

    @property
    def fallbacks(self) -> list[str]:
        """The types of operations without a rule to which a part was given."""
        return sorted(
            {
                node.type
                for node in _nodes(self.partition.graph)
                if node.plan.is_fallback and any(v.layout != WHOLE for v in node.inputs)
            }
        )

    @property
    def gathers(self) -> list[str]:
        """What is gathered, but for what the function returns."""
        outputs = self.partition.graph.outputs
        return [
            value.node.type if value.node else "argument"
            for value in self.traffic.gathers
            if value not in outputs
        ]


class OverRows:
    """A graph partitioned by rows, all replicas in this process.

    Args:
        function: What has the ``graph``.
        has_rows: Of each argument.
        replicas: How many there are.
        expected: Rows of a batch.
    """

    def __init__(
        self, function: Any, has_rows: Sequence[bool], replicas: int, expected: int
    ):
        self.has_rows, self.replicas = has_rows, replicas
        layouts = [ROWS if rows else WHOLE for rows in has_rows]
        self.partition = Partition(function, layouts, Rows.unknown(expected))
        self.traffic = Traffic()
        specs = [
            tf.TensorSpec(t.shape, t.dtype)
            for t in function.graph.inputs[: len(has_rows)]
        ]
        self._emitted = tf.function(self._emit, autograph=False).get_concrete_function(
            tf.TensorSpec([replicas], tf.int64), *specs
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
        self, counts: Sequence[int], arguments: Sequence[Any]
    ) -> list[np.ndarray]:
        """The outputs, with so many rows on each replica."""
        made = self._emitted(
            tf.constant(counts, tf.int64), *map(tf.constant, arguments)
        )
        return [t.numpy() for t in made]


class Meshed:
    """A function of arguments and variables, whole and on a mesh.

    Args:
        function: Called with lists of both; returns tensors.
        arguments: Arrays, as an example.
        has_rows: Of each argument.
        weights: The variables.
        places, replicas: Ranks of the model axis, and of the axis of the batch.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[tf.Tensor]],
        arguments: Sequence[np.ndarray],
        has_rows: Sequence[bool],
        weights: Sequence[Weight],
        *,
        places: int,
        replicas: int,
    ):
        self.weights, self.places, self.has_rows = weights, places, has_rows
        self.variables = [tf.Variable(weight.value) for weight in weights]
        specs = [
            tf.TensorSpec([None, *np.shape(a)[1:]] if rows else np.shape(a), a.dtype)
            for a, rows in zip(arguments, has_rows, strict=True)
        ]

        def traced(*given: tf.Tensor) -> list[tf.Tensor]:
            made = function(list(given), self.variables)
            return [tf.identity(t) for t in tf.nest.flatten(made)]

        self.stock = tf.function(traced, autograph=False).get_concrete_function(*specs)
        self.cut = []
        for weight, variable in zip(weights, self.variables, strict=True):
            if weight.axis is not None:
                layout = weight.layout(places)
                parts = [
                    tf.Variable(piece(weight.value, layout, i, places))
                    for i in range(places)
                ]
                self.cut.append((variable, layout, parts))
        self.model = OnePass(self.stock, places, self.cut, has_rows)
        rows = [len(a) for a, has in zip(arguments, has_rows, strict=True) if has]
        self.rows = OverRows(self.model, has_rows, replicas, max([1, *rows]))

    def compare(
        self, counts: Sequence[int], arguments: Sequence[Any], tolerance: float = 1e-12
    ) -> None:
        """Fails where results or variables differ afterwards."""
        before = [variable.numpy() for variable in self.variables]
        want = [t.numpy() for t in self.stock(*map(tf.constant, arguments))]
        after = [variable.numpy() for variable in self.variables]
        whole = {id(variable) for variable, _, _ in self.cut}
        for variable, value in zip(self.variables, before, strict=True):
            variable.assign(value)
        for variable, layout, parts in self.cut:
            for i, part in enumerate(parts):
                part.assign(piece(variable, layout, i, self.places))
        got = self.rows(counts, arguments)
        for number, (a, b) in enumerate(zip(want, got, strict=True)):
            assert a.shape == b.shape, (number, a.shape, b.shape)
            assert_close(b, a, f"result {number}", tolerance)
        parts_of = {id(v): joined(parts, layout) for v, layout, parts in self.cut}
        for number, (variable, value) in enumerate(
            zip(self.variables, after, strict=True)
        ):
            made = parts_of[id(variable)] if id(variable) in whole else variable.numpy()
            assert_close(made, value, f"variable {number}", tolerance)
            variable.assign(value)


def assert_close(got: Any, want: Any, name: str, tolerance: float) -> None:
    """Compares by the largest element, so that what cancels is no error."""
    got, want = np.asarray(got), np.asarray(want)
    if got.dtype.kind not in "fc":
        assert (got == want).all(), name
        return
    scale = max(float(np.abs(want).max(initial=0)), 1.0)
    worst = float(np.abs(got - want).max(initial=0)) / scale
    assert worst <= tolerance, f"{name}: {worst}"


class Ranks:
    """The same function, of which each thread makes the graph of one rank of the mesh.

    Args:
        meshed: What has the function, and its variables.
        has_rows: Of each argument.
        replicas: Ranks of the axis of the batch.
    """

    def __init__(self, meshed: Meshed, has_rows: Sequence[bool], replicas: int):
        places = meshed.places
        self.meshed, self.has_rows, self.replicas = meshed, has_rows, replicas
        self.along = [Group(places) for _ in range(replicas)]
        self.across = [Group(replicas) for _ in range(places)]
        self._emissions: list[Any] = []
        self._kept: list[tf.Variable] = []  # a handle is known by its id
        self.traffic: list[Traffic] = []
        self.variables: list[list[tf.Variable]] = []
        for replica in range(replicas):
            for part in range(places):
                model = ThreadExchange(self.along[replica], part)
                rows = ThreadExchange(self.across[part], replica, {"model": model})
                self._emissions.append(self._partitioned(part, replica, rows))
        specs = [
            tf.TensorSpec(t.shape, t.dtype)
            for t in meshed.stock.graph.inputs[: len(has_rows)]
        ]
        self._emitted = tf.function(self._emit, autograph=False).get_concrete_function(
            tf.TensorSpec([replicas], tf.int64), *specs
        )

    @property
    def graph(self) -> tf.Graph:
        """The graph of all ranks."""
        return self._emitted.graph

    def _partitioned(self, part: int, replica: int, exchange: ThreadExchange) -> Any:
        meshed = self.meshed
        cut = {id(v): layout for v, layout, _ in meshed.cut}
        mine, placed, pieces_ = [], {}, {}
        for weight, variable in zip(meshed.weights, meshed.variables, strict=True):
            layout = cut.get(id(variable), WHOLE)
            value = variable.numpy()
            if isinstance(layout, Sharded):
                value = piece(value, layout, part, meshed.places)
            between = variable
            if weight.in_pieces:
                between = tensorflow_names.stand_in(value.shape, value.dtype.name)
                self._kept.append(between)
                value = pieces.cut(value, replica, self.replicas)
            mine.append(tf.Variable(value))
            if weight.in_pieces:
                pieces_[id(between.handle)] = Placed(OWNED, [mine[-1].handle])
            else:
                between = mine[-1]
            placed[id(variable.handle)] = Placed(layout, [between.handle])
        self.variables.append(mine)
        passed: Any = meshed.stock
        if meshed.places > 1:
            passed = AxisPass(
                meshed.stock, "model", part, meshed.places, placed, None, self.has_rows
            )
        else:
            pieces_ = {
                key: pieces_.get(id(of.handles[0]), of) for key, of in placed.items()
            }
        layouts = [ROWS if rows else WHOLE for rows in self.has_rows]
        partition = Partition(passed, layouts, Rows.unknown(8), None, pieces_)
        traffic = Traffic()
        self.traffic.append(traffic)

        def emit(counts: tf.Tensor, given: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            ends = tf.cumsum(counts)
            first, own = ends[replica] - counts[replica], counts[replica]
            share = Share.of(ends[-1], [(first, own, tf.constant(not replica))])
            parts = [
                [x[first : first + own]] if rows else [x]
                for x, rows in zip(given, self.has_rows, strict=True)
            ]
            made, _ = partition.emit(parts, share, exchange, traffic)
            return [tensors[0] for tensors in made]

        return emit

    def _emit(self, counts: tf.Tensor, *given: tf.Tensor) -> Any:
        calls = [lambda emit=emit: emit(counts, given) for emit in self._emissions]
        return together(calls, [*self.along, *self.across])

    def compare(
        self, counts: Sequence[int], arguments: Sequence[Any], tolerance: float = 1e-12
    ) -> None:
        """Fails where a rank's results, or its variables afterwards, are others."""
        given = [tf.constant(counts, tf.int64), *map(tf.constant, arguments)]
        want = [t.numpy() for t in self.meshed.stock(*given[1:])]
        for rank, results in enumerate(self._emitted(*given)):
            for number, (a, b) in enumerate(zip(want, results, strict=True)):
                assert_close(b, a, f"result {number} of rank {rank}", tolerance)
        cut = {id(v): layout for v, layout, _ in self.meshed.cut}
        for rank, mine in enumerate(self.variables):
            for number, (v, weight, held) in enumerate(
                zip(self.meshed.variables, self.meshed.weights, mine, strict=True)
            ):
                value = v.numpy()
                if id(v) in cut:
                    part = rank % self.meshed.places
                    value = piece(value, cut[id(v)], part, self.meshed.places)
                if weight.in_pieces:
                    replica = rank // self.meshed.places
                    value = pieces.cut(value, replica, self.replicas)
                assert_close(held, value, f"variable {number} of {rank}", tolerance)
