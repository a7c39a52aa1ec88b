"""``tf.function`` for functions of this package, and what is in traced ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def traced(function: Callable[..., Any], **options: Any) -> Any:
    """A ``tf.function`` without AutoGraph and without TensorFlow's advice on retracing.

    Each training traces these functions again, as Keras does with its own. After the fifth
    in a process TensorFlow would advise the user to change functions that are not theirs.
    """
    made = tf.function(function, autograph=False, **options)
    made._omit_frequent_tracing_warning = True  # no argument sets it
    return made


def nodes_of(graph: Any) -> list[Any]:
    """The ``NodeDef`` of each operation, also of the functions that the graph calls."""
    definition = graph.as_graph_def()
    functions = definition.library.function
    return [*definition.node, *(n for f in functions for n in f.node_def)]
