"""Names of the collectives of a graph, by which ranks match them."""

from __future__ import annotations

import re
import weakref
from typing import Any


class CallNames:
    """Names each call by its function, and by its number in that function.

    TensorFlow's own names come from the names of tensors, or from a counter of the
    process. Both differ between ranks if one rank traces a function more often than
    another.

    Attributes:
        prefix: The begin of each name: the members of a group of ranks.
    """

    prefix = ""

    def __init__(self) -> None:
        # Calls traced so far in each function.
        self._traced: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def next(self) -> str | None:
        """Return the name for the call that is being traced; None outside of graphs."""
        import tensorflow as tf

        if tf.executing_eagerly():
            return None
        graph = tf.compat.v1.get_default_graph()
        # Leave the bodies of loops and branches, whose names have numbers that differ.
        while isinstance(
            getattr(graph, "outer_graph", None), tf.__internal__.FuncGraph
        ):
            graph = graph.outer_graph
        number = self._traced[graph] = self._traced.get(graph, 0) + 1
        # The name of a backward pass contains the number of its trace.
        function = re.sub(r"_\d+", "", graph.name)
        return re.sub("[^A-Za-z0-9]+", "_", f"{self.prefix}sums {number} of {function}")
