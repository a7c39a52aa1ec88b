"""``tf.function`` for functions of this package, and the operations of traced functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.training.keras_compat.tensorflow_names import determinism


def traced(function: Callable[..., Any], **options: Any) -> Any:
    """Return a ``tf.function`` without AutoGraph and TensorFlow's advice on retracing.

    Each training traces these functions again, as Keras does with its own. After the fifth
    training of a process, TensorFlow would advise the user to change functions that are not
    theirs.
    """
    made = tf.function(function, autograph=False, **options)
    made._omit_frequent_tracing_warning = True  # no argument sets it
    return made


def kept_with(
    model: keras.Model, what: str, of: Sequence[object], flags: Sequence[bool] = ()
) -> dict[Any, Any]:
    """Return the graphs that were traced for a model, by their use; empty after a change.

    They are an attribute of the model, as Keras' ``train_function`` is, so that both end
    together. They are also dropped when determinism of operations is switched on or off,
    because some operations, such as our clock, fail with it.

    Args:
        what: Part of the attribute's name.
        of: Objects that the graphs use; the graphs are dropped if one is replaced.
        flags: Values on which the graphs depend in the same way.
    """
    name = f"_collective_{what}"
    key = ([id(one) for one in of], [*flags, determinism.is_enabled()])
    kept = vars(model).get(name)
    if kept is None or kept.key != key:
        kept = vars(model)[name] = _Kept(key, list(of))
    return kept.made


class _Kept:
    """Graphs, and the objects whose ids are their key; Keras does not look into it."""

    def __init__(self, key: object, of: list[object]):
        self.key, self._of = key, of
        self.made: dict[Any, Any] = {}


def nodes_of(graph: tf.Graph) -> list[Any]:
    """Return the ``NodeDef`` of each operation, also in functions that the graph calls."""
    definition = graph.as_graph_def()
    functions = definition.library.function
    return [*definition.node, *(n for f in functions for n in f.node_def)]
