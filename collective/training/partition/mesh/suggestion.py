"""A layout map for a model that has none: cuts that exchange few bytes.

Each weight is tried along each of its axes, in the order of the model and in reverse, then
with its neighbours: the pass over the model axis says what a step would exchange. A cut is
taken if that is less than to hold the weight in pieces would cost (ZeRO-3: it is joined twice
a step, and its gradient scattered). So pairs of dense layers, heads, words, experts and channels are found by what they do, not
by their names.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.log import log
from collective.training import keras_compat
from collective.training.partition.layouts import Sharded
from collective.training.partition.mesh.layouts import Mesh, blocks_of, lay_out
from collective.training.partition.mesh.trials import Trials

Axes = tuple[str | None, ...]
# So many matrices are tried one by one; of more, those of equal blocks together.
_ONE_BY_ONE = 24
_MESSAGE = 4096  # bytes that a message costs beside its content
_SLOW = 2.0  # seconds after which a line says what takes so long
_JOINS = 3  # how often ZeRO-3 sends a weight in a step


def suggest(
    model: keras.Model,
    mesh: Mesh,
    *,
    x: Any = None,
    rows: int = 32,
    settled: Mapping[str, Axes] = MappingProxyType({}),
) -> dict[str, Axes]:
    """Return a layout for each variable of a model that is worth being cut.

    Args:
        model: Built.
        mesh: Of which the first axis with several ranks that is not the batch's is used.
        x: Inputs, as an example, for a model without symbolic ones.
        rows: The rows of a batch, to weigh activations by.
        settled: By path, layouts of variables for which none is looked for.

    Returns:
        By path, those that are found. Of a model that is small beside a message, what is worth its bytes alone.

    Raises:
        UsageError: The mesh has no model axis, or the model no inputs.
    """
    if not mesh.model_axes:
        raise UsageError(
            "a mesh without an axis for the model",
            hint="an axis of several ranks beside that of the batch",
        )
    axis = mesh.model_axes[0]
    watch = _Watch(len(_weights(model)) - len(settled))
    traced = _traced(model, x)
    for message in (_MESSAGE, 0):
        trials = Trials(traced, mesh.sizes[axis], rows, message)
        found = _Search(model, mesh, axis, trials, watch, settled).best()
        if any(len(names) > 1 for names in found.values()):
            break
    return found


def _traced(model: keras.Model, x: Any) -> Any:
    """Return the forward and the backward pass, for batches of any length."""
    specs = _inputs_of(model, x)

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

    inputs = keras_compat.model.symbolic_inputs(model) if x is None else x
    try:
        return step.get_concrete_function(specs)
    except Exception as error:  # of the model's code
        if inputs is not None:
            raise
        raise UsageError(
            f"the model {model.name!r} has no symbolic inputs, and cannot be called with "
            f"numbers of the shapes that it was built for ({error})",
            hint="suggest(model, mesh, x=inputs)",
        ) from error


def _inputs_of(model: keras.Model, x: Any) -> Any:
    """Return what a model is called with, for batches of any length.

    A model without symbolic inputs was built for shapes, of which the types are not known:
    they are taken for numbers, which Keras' layers cast to what they need.
    """

    def spec(shape: Sequence[int | None], dtype: Any) -> tf.TensorSpec:
        return tf.TensorSpec([None, *shape[1:]], tf.as_dtype(dtype))

    given = keras_compat.model.symbolic_inputs(model) if x is None else x
    if given is not None:
        return tf.nest.map_structure(lambda t: spec(t.shape, t.dtype), given)
    shapes = keras_compat.model.built_shapes(model)
    if shapes is None:
        raise UsageError(
            f"the model {model.name!r} has no symbolic inputs",
            hint="suggest(model, mesh, x=inputs)",
        )
    return keras.tree.map_shape_structure(
        lambda shape: spec(shape, model.compute_dtype), shapes
    )


def _weights(model: keras.Model) -> list[Any]:
    """Return the variables that may be cut: what is trained, and frozen matrices."""
    return [
        v
        for v in model.weights
        if v.trainable or (len(v.shape) > 1 and tf.as_dtype(v.dtype).is_floating)
    ]


def _groups(variables: Sequence[Any]) -> list[list[Any]]:
    """Return variables that are cut alike: of many, equal ones of equal blocks."""
    groups: dict[Any, list[Any]] = {}
    count = sum(len(variable.shape) > 1 for variable in variables)
    for number, variable in enumerate(variables):
        block = re.sub(r"\d+", "", keras_compat.model.path_of(variable))
        key = (block, tuple(variable.shape)) if count > _ONE_BY_ONE else number
        groups.setdefault(key, []).append(variable)
    return [group for group in groups.values() if group[0].shape]


class _Watch:
    """Says once that a search takes long."""

    def __init__(self, count: int):
        self._count, self._begin = count, time.monotonic()
        self._is_said = False

    def look(self) -> None:
        """Say it if it is so."""
        if not self._is_said and time.monotonic() - self._begin > _SLOW:
            self._is_said = True
            log.info(
                "looking for layouts of %d weights; a layout map of your own needs no "
                "search",
                self._count,
            )


class _Search:
    """The layouts that are chosen so far, and what they cost."""

    def __init__(
        self,
        model: keras.Model,
        mesh: Mesh,
        axis: str,
        trials: Trials,
        watch: _Watch,
        settled: Mapping[str, Axes],
    ):
        self.chosen: dict[str, Axes] = {}
        self._variables = {keras_compat.model.path_of(v): v for v in _weights(model)}
        self._settled = {p: n for p, n in settled.items() if p in self._variables}
        self._handles = {
            path: id(keras_compat.model.tf_variable(v).handle)
            for path, v in self._variables.items()
        }
        self._groups = _groups(
            [v for path, v in self._variables.items() if path not in settled]
        )
        # Those that may still be cut as their gradients are: writing them costs nothing.
        self._open: set[int] = set()
        self._mesh, self._axis = mesh, axis
        self._blocks = blocks_of(model)
        self._trials, self._watch = trials, watch
        self._costs: dict[Any, float | None] = {}

    def best(self) -> dict[str, Axes]:
        """Return layouts that are not better if one or two neighbours are otherwise."""
        tried = [self._begun(order) for order in (1, -1)]
        self.chosen = min(tried, key=self.price)
        for one, other in itertools.pairwise(self._groups):
            self.settle(one, other)
        return {p: n for p, n in self.chosen.items() if p not in self._settled}

    def _begun(self, order: int) -> dict[str, Axes]:
        """Return layouts of matrices that are found one by one, and of vectors with them.

        Args:
            order: 1 to begin with the first weights of the model, -1 with the last ones.
        """
        self.chosen = {path: n for path, n in self._settled.items() if any(n)}
        self._open = {h for p, h in self._handles.items() if p not in self._settled}
        matrices = [g for g in self._groups if len(g[0].shape) > 1][::order]
        vectors = [g for g in self._groups if len(g[0].shape) == 1]
        for group in matrices:
            self.settle(group)
        # The first ones were settled before those that they belong to.
        for one, other in itertools.pairwise(matrices):
            self.settle(one, other)
        for group in vectors:
            self.settle(group)
        return self.chosen

    def price(self, layouts: Mapping[str, Axes]) -> float:
        """Return the bytes of a step, with those of ZeRO-3 for matrices that are not cut."""
        left = (
            keras_compat.model.bytes_of(v)
            for path, v in self._variables.items()
            if len(v.shape) > 1 and path not in layouts and path not in self._settled
        )
        cost = self.cost(layouts)
        return math.inf if cost is None else cost + _JOINS * sum(left)

    def settle(self, *groups: Sequence[Any]) -> None:
        """Cut the variables of each group along the axis, or none, that costs least."""
        self._watch.look()
        paths = [[keras_compat.model.path_of(v) for v in group] for group in groups]
        named = set(itertools.chain(*paths))
        self._open -= {self._handles[path] for path in named}
        others = {p: n for p, n in self.chosen.items() if p not in named}
        best = math.inf
        for axes in itertools.product(*(self._axes(group[0]) for group in groups)):
            tried = dict(others)
            for of_group, names in zip(paths, axes, strict=True):
                if any(names):
                    tried.update(dict.fromkeys(of_group, names))
            # A vector is cut with the matrix that it belongs to, if that costs nothing.
            price = self.price(tried)
            if price < best:
                best, self.chosen = price, tried

    def _axes(self, variable: Any) -> list[Axes]:
        """Return the ways to cut a variable; the last one is to keep it whole."""
        places = range(len(variable.shape))
        return [
            tuple(self._axis if place == cut else None for place in places)
            for cut in (*places, None)
        ]

    def cost(self, layouts: Mapping[str, Axes]) -> float | None:
        """Return the bytes of a step over the axis; None if an axis is not divided."""
        key = frozenset(layouts.items()), frozenset(self._open)
        if key not in self._costs:
            self._costs[key] = self._exchanged(layouts)
        return self._costs[key]

    def _exchanged(self, layouts: Mapping[str, Axes]) -> float | None:
        placed: dict[int, Sharded] = {}
        for path, names in layouts.items():
            shape = self._variables[path].shape
            blocks = self._blocks.get(path, 1)
            layout, reasons = lay_out(path, shape, names, self._mesh, blocks)
            if reasons:
                return None
            placed[self._handles[path]] = layout.cut[self._axis]
        try:
            return self._trials.exchanged(placed, self._open)
        except UsageError:
            return None  # a variable is used in a way that has no rule


class Exact(dict[str, Axes]):
    """A layout map by exact path."""

    def __missing__(self, key: str) -> None:
        return None
