"""A layout map for a model that has none: cuts that exchange few bytes.

Each weight is tried along each of its axes, in the order of the model: the pass over the
model axis says what a step would exchange. A cut is taken if that is less than to hold the
weight in pieces would cost (ZeRO-3: it is joined twice a step, and its gradient scattered).
So pairs of dense layers, heads, words, experts and channels are found by what they do, not
by their names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.partition.graph import Graph, Value
from collective.training.partition.layouts import WHOLE, Partial, is_whole
from collective.training.partition.mesh.layouts import Layouts, Mesh, resolve
from collective.training.partition.partition import Partition, Placed
from collective.training.partition.plans import Rows
from collective.training.partition.schedule import is_write
from collective.training.partition.sizes import product

Axes = tuple[str | None, ...]
# So many matrices are tried one by one; of more, those of equal blocks together.
_ONE_BY_ONE = 24
_MESSAGE = 4096  # bytes that a message costs beside its content
_SWEEPS = 2
_JOINS = 3  # how often ZeRO-3 sends a weight in a step


def suggest(
    model: keras.Model, mesh: Mesh, *, x: Any = None, rows: int = 32
) -> dict[str, Axes]:
    """Return a layout for each variable of a model that is worth being cut.

    Args:
        model: Built.
        mesh: Of which the first axis with several ranks that is not the batch's is used.
        x: Inputs, as an example, for a model without symbolic ones.
        rows: The rows of a batch, to weigh activations by.

    Raises:
        UsageError: The mesh has no model axis, or the model no inputs.
    """
    if not mesh.model_axes:
        raise UsageError(
            "a mesh without an axis for the model",
            hint="an axis of several ranks beside that of the batch",
        )
    axis = mesh.model_axes[0]
    search = _Search(model, mesh, axis, _traced(model, x), rows)
    for _ in range(_SWEEPS):  # the first ones are settled before their likes are
        for group in _groups(model.trainable_variables):
            search.settle(group)
    return search.chosen


def _traced(model: keras.Model, x: Any) -> Any:
    """Return the forward and the backward pass, for batches of any length."""
    given = model.inputs if x is None and hasattr(model, "inputs") else x
    if given is None:
        raise UsageError(
            f"the model {model.name!r} has no symbolic inputs",
            hint="suggest(model, mesh, x=inputs)",
        )
    specs = tf.nest.map_structure(
        lambda t: tf.TensorSpec([None, *t.shape[1:]], tf.as_dtype(t.dtype)), given
    )
    if x is None and len(specs) == 1:
        specs = specs[0]

    @tf.function(autograph=False)
    def step(inputs: Any) -> Any:
        variables = [v.value for v in model.trainable_variables]
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(model(inputs, training=True))
            losses = [
                tf.reduce_mean(tf.square(t)) for t in outputs if t.dtype.is_floating
            ]
            loss = tf.add_n([tf.cast(t, tf.float32) for t in losses])
        slopes = tape.gradient(loss, variables)
        for variable, slope in zip(variables, slopes, strict=True):
            if slope is not None:
                variable.assign_sub(tf.convert_to_tensor(slope))
        return loss

    return step.get_concrete_function(specs)


def _groups(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Return variables that are cut alike: equal ones of equal blocks; matrices first."""
    matrices = [v for v in variables if len(v.shape) > 1]
    vectors = [v for v in variables if len(v.shape) == 1]
    for found in (matrices, vectors):
        groups: dict[Any, list[Any]] = {}
        for number, variable in enumerate(found):
            block = re.sub(r"\d+", "", keras_compat.model.path_of(variable))
            alike = (block, tuple(variable.shape))
            key = alike if len(found) > _ONE_BY_ONE else number
            groups.setdefault(key, []).append(variable)
        yield from groups.values()


class _Search:
    """The layouts that are chosen so far, and what they cost."""

    def __init__(
        self, model: keras.Model, mesh: Mesh, axis: str, traced: Any, rows: int
    ):
        self.chosen: dict[str, Axes] = {}
        # Those that may still be cut as their gradients are: writing them costs nothing.
        self._open = {
            id(keras_compat.model.tf_variable(v).handle)
            for v in model.trainable_variables
        }
        self._model, self._mesh, self._axis = model, mesh, axis
        self._traced, self._rows = traced, rows
        self._costs: dict[Any, float | None] = {}

    def settle(self, group: Sequence[Any]) -> None:
        """Cut the variables of a group along the axis that exchanges least."""
        shape = group[0].shape
        handles = (keras_compat.model.tf_variable(v).handle for v in group)
        self._open -= set(map(id, handles))
        paths = [keras_compat.model.path_of(v) for v in group]
        without = {p: n for p, n in self.chosen.items() if p not in paths}
        before = self._cost(without) or 0
        size = sum(map(keras_compat.model.bytes_of, group))
        found: tuple[float, dict[str, Axes]] | None = None
        for place in range(len(shape)):
            names = tuple(self._axis if i == place else None for i in range(len(shape)))
            tried = without | dict.fromkeys(paths, names)
            cost = self._cost(tried)
            if cost is not None and (found is None or cost < found[0]):
                found = cost, tried
        # A small variable is cut with the one it belongs to, if that costs nothing.
        worth = _JOINS * size if len(shape) > 1 else 0
        if found is not None and found[0] - before <= worth:
            self.chosen = found[1]
        else:
            self.chosen = without

    def _cost(self, layouts: Mapping[str, Axes]) -> float | None:
        """Return the bytes of a step over the axis; None if an axis is not divided."""
        key = tuple(sorted(layouts.items()))
        if key not in self._costs:
            self._costs[key] = self._exchanged(layouts)
        return self._costs[key]

    def _exchanged(self, layouts: Mapping[str, Axes]) -> float | None:
        found: Layouts = resolve(self._model, Exact(layouts), self._mesh)
        if found.kept_whole:
            return None
        by_id = {
            id(keras_compat.model.tf_variable(v).handle): found.of(v).cut.get(
                self._axis
            )
            for v in self._model.variables
        }
        placed = {key: Placed(lay, []) for key, lay in by_id.items() if lay is not None}
        function = self._traced
        count = len(function.graph.inputs) - len(function.graph.captures)
        try:
            partition = Partition(
                function,
                [WHOLE] * count,
                Rows.places(self._mesh.sizes[self._axis]),
                None,
                placed,
                range(count),
            )
        except UsageError:
            return None  # a variable is used in a way that has no rule
        captures = zip(
            partition.graph.inputs[count:], function.graph.captures, strict=True
        )
        open_ = {value for value, (outer, _) in captures if id(outer) in self._open}
        return exchanged_bytes(partition.graph, self._rows, open_)


class Exact(dict[str, Axes]):
    """A layout map by exact path."""

    def __missing__(self, key: str) -> None:
        return None


def exchanged_bytes(graph: Graph, rows: int, open_: Collection[Value] = ()) -> float:
    """Return bytes that the plans of a graph exchange, with so many rows in a batch.

    Args:
        open_: Handles of variables whose writes cost nothing.
    """
    total, seen = 0.0, set()
    for node in graph.nodes:
        for body in node.bodies:
            total += exchanged_bytes(body, rows)
        if is_write(node) and node.inputs and node.inputs[0] in open_:
            continue
        for value, wanted in zip(node.inputs, node.plan.inputs, strict=True):
            if wanted is None or not is_whole(wanted) or is_whole(value.layout):
                continue
            if value not in seen and not value.is_handle:
                seen.add(value)
                total += _MESSAGE + _sent(value, rows)
    return total


def _sent(value: Value, rows: int) -> float:
    """Return the bytes of a value that is summed, which travels twice, or gathered."""
    size = product(value.shape or ())
    if not isinstance(size, int):
        size = sum(f * rows ** len(term) for term, f in size.terms.items())
    times = 2 if isinstance(value.layout, Partial) else 1
    return float(times * size * value.dtype.size)
