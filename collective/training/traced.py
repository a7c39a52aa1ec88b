"""``tf.function`` for functions of this package, and what is in traced ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.training.keras_compat.tensorflow_names import determinism


def traced(function: Callable[..., Any], **options: Any) -> Any:
    """A ``tf.function`` without AutoGraph and without TensorFlow's advice on retracing.

    Each training traces these functions again, as Keras does with its own. After the fifth
    in a process TensorFlow would advise the user to change functions that are not theirs.
    """
    made = tf.function(function, autograph=False, **options)
    made._omit_frequent_tracing_warning = True  # no argument sets it
    return made


def kept_with(
    model: keras.Model, what: str, of: Sequence[Any], flags: Sequence[bool] = ()
) -> dict[Any, Any]:
    """What was traced for a model, by what it is for; empty where something has changed.

    As Keras keeps ``train_function``. It is an attribute of the model: both end together.
    Nor does it serve after determinism of operations was switched on or off: a graph of
    before may have operations that fail with it, such as our clock.

    Args:
        what: Part of the attribute's name.
        of: Objects that are in the graphs: others, and nothing serves any more.
        flags: Values that are, likewise.
    """
    name = f"_collective_{what}"
    key = ([id(one) for one in of], [*flags, determinism.is_enabled()])
    kept = vars(model).get(name)
    if kept is None or kept.key != key:
        kept = vars(model)[name] = _Kept(key, list(of))
    return kept.made


class _Kept:
    """Not a container that Keras looks into; it holds the objects whose ids are its key."""

    def __init__(self, key: Any, of: list[Any]):
        self.key, self._of = key, of
        self.made: dict[Any, Any] = {}


def nodes_of(graph: Any) -> list[Any]:
    """The ``NodeDef`` of each operation, also of the functions that the graph calls."""
    definition = graph.as_graph_def()
    functions = definition.library.function
    return [*definition.node, *(n for f in functions for n in f.node_def)]
