"""Which layers couple the rows of a batch, found by trying.

A layer of the user's own is called on whole batches, while all others see a piece of the
rows: where the step then equals Keras', the coupling is in that layer, and replicas can
compute it on the rows of all (``variants/coupled/whole_layers.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.training import keras_compat

# More trials than this cost more than they find.
_MOST = 8


def candidates(model: keras.Model) -> list[int]:
    """Places of layers with the user's code, and no such layer inside.

    Returns:
        Among ``model._flatten_layers()``. None at all if there are many.
    """
    layers = list(model._flatten_layers())
    places = [
        place
        for place, layer in enumerate(layers)
        if layer is not model and _may_couple(layer)
    ]
    found = [
        place
        for place in places
        if not any(
            layers[other] in layers[place]._flatten_layers(include_self=False)
            for other in places
            if other != place
        )
    ]
    return found if len(found) <= _MOST else []


def _may_couple(layer: keras.Layer) -> bool:
    """Whether it runs the user's code; its metrics would count rows of all replicas."""
    if isinstance(layer, keras.Model) or layer.metrics_variables:
        return False
    own = type(layer).call.__module__.split(".")[0] != "keras"
    return own or isinstance(layer, keras.layers.Lambda)


def fewest(
    places: Sequence[int], equals: Callable[[Sequence[int]], bool]
) -> tuple[int, ...]:
    """The layers without which the step is not Keras'; none if it never is."""
    chosen = list(places)
    if not chosen or not equals(chosen):
        return ()
    for place in places:
        fewer = [p for p in chosen if p != place]
        if fewer and equals(fewer):
            chosen = fewer
    return tuple(chosen)


class WholeCalls:
    """Calls of layers on a whole batch, and again where others see a piece of it.

    A row owes something to what the layer makes of all rows. Where pieces follow one
    another, the gradient of a piece's inputs is therefore that which a pass over the whole
    batch had; all other gradients are the pieces' own, and so are compared.

    Args:
        places: Of the layers, among ``model._flatten_layers()``.
        sizes: Rows of the pieces.
    """

    def __init__(self, model: keras.Model, places: Sequence[int], sizes: Sequence[int]):
        layers = list(model._flatten_layers())
        self.layers = [layers[place] for place in places]
        self.sizes = sizes
        self._inputs: dict[int, list[list[Any]]] = {id(x): [] for x in self.layers}
        self._again: dict[int, int] = {id(layer): 0 for layer in self.layers}
        # Those of ``inputs()`` in the pass over the whole batch.
        self.gradients: Iterator[Any] = iter(())
        self._of_inputs: dict[int, Any] = {}

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Around a pass over the whole batch."""

        def one(layer: keras.Layer, call: Any, args: Any, kwargs: Any) -> Any:
            # Copies, whose gradients are owed to this call alone.
            leaves = [
                keras_compat.copy_tensor(leaf) if isinstance(leaf, tf.Tensor) else leaf
                for leaf in tf.nest.flatten((args, kwargs))
            ]
            self._inputs[id(layer)].append(leaves)
            args, kwargs = tf.nest.pack_sequence_as((args, kwargs), leaves)
            return call(*args, **kwargs)

        with keras_compat.around_layer_calls(self.layers, one):
            yield

    def inputs(self) -> list[tf.Tensor]:
        """Those that may have a gradient, of all recorded calls."""
        calls = (leaves for layer in self.layers for leaves in self._inputs[id(layer)])
        every = [leaf for leaves in calls for leaf in leaves]
        return [t for t in every if _of(t, sum(self.sizes)) and t.dtype.is_floating]

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Around passes over the pieces, in order."""
        pairs = zip(self.inputs(), self.gradients, strict=False)
        self._of_inputs = {id(tensor): gradient for tensor, gradient in pairs}
        with keras_compat.around_layer_calls(self.layers, self._repeat):
            yield

    def _repeat(self, layer: keras.Layer, call: Any, args: Any, kwargs: Any) -> Any:
        """The layer's rows of what it makes of the whole batch."""
        recorded, number = self._inputs[id(layer)], self._again[id(layer)]
        self._again[id(layer)] += 1
        piece, place = divmod(number, len(recorded))
        begin = int(np.sum(self.sizes[:piece]))
        end = begin + self.sizes[piece]
        leaves = tf.nest.flatten((args, kwargs))
        whole = [
            _joined(before, leaf, begin, end, sum(self.sizes))
            for before, leaf in zip(recorded[place], leaves, strict=True)
        ]
        args, kwargs = tf.nest.pack_sequence_as((args, kwargs), whole)

        def own(tensor: Any) -> Any:
            if not _of(tensor, sum(self.sizes)):
                return tensor
            return keras_compat.cut_tensor(tensor, begin, end)

        outputs = tf.nest.map_structure(own, call(*args, **kwargs))
        owed = [
            (leaf, gradient[begin:end])
            for before, leaf in zip(recorded[place], leaves, strict=True)
            if (gradient := self._of_inputs.get(id(before))) is not None
        ]
        return _owing(outputs, owed) if owed else outputs


def _of(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.shape[:1].as_list() == [rows]


def _joined(before: Any, leaf: Any, begin: int, end: int, rows: int) -> Any:
    """The recorded rows with those of a piece in their place, and masks alike."""
    if not (_of(before, rows) and _of(leaf, end - begin)):
        return leaf
    parts = [before[:begin], tf.stop_gradient(leaf), before[end:]]
    joined = tf.concat(parts, axis=0)
    masks = keras_compat.mask_of(before), keras_compat.mask_of(leaf)
    if all(mask is not None for mask in masks):
        keras_compat.set_mask(joined, _joined(*masks, begin, end, rows))
    return joined


def _owing(outputs: Any, owed: list[tuple[tf.Tensor, tf.Tensor]]) -> Any:
    """The outputs; in the backward pass, inputs get these gradients."""
    inputs, gradients = zip(*owed, strict=True)

    @tf.custom_gradient
    def same(output: tf.Tensor, *_: tf.Tensor) -> Any:
        return tf.identity(output), lambda upstream: (upstream, *gradients)

    leaves = tf.nest.flatten(outputs)
    first = next(i for i, t in enumerate(leaves) if t.dtype.is_floating)
    mask = keras_compat.mask_of(leaves[first])
    leaves[first] = same(leaves[first], *inputs)
    if mask is not None:
        keras_compat.set_mask(leaves[first], mask)
    return tf.nest.pack_sequence_as(outputs, leaves)
