"""The collectives of a job in one order, for backends that need one.

TensorFlow runs two stateful ops of a graph in any order if they share no resource. If a
backend needs an order, each collective reads and then writes one variable, which orders
them also in branches and loops. If a backend matches collectives by their order, as MPI
does, the ranks compare the next call before each collective.
"""

from __future__ import annotations

import atexit
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import InTurn, MatchedByOrder

END = "the end of the program"


class Order:
    """Runs collectives in the order of the program, and checks that ranks agree.

    Args:
        backend: Runs the collectives; unless it is ``InTurn``, nothing is added to a
            collective.
    """

    def __init__(self, backend: Backend):
        self._in_turn = isinstance(backend, InTurn) and backend.size > 1
        if not self._in_turn:
            return
        self._matching = backend if isinstance(backend, MatchedByOrder) else None
        with tf.init_scope(), tf.device("CPU:0"):
            self._token = tf.Variable(0, trainable=False, name="collective_order")
        # For each graph: its number of collectives and the op that ends the last one.
        self._graphs: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = (
            weakref.WeakKeyDictionary()
        )
        if self._matching is not None:
            atexit.register(_end, weakref.ref(self._matching))

    def run(
        self,
        what: str,
        tensors: Sequence[tf.Tensor],
        collective: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """Run a collective of tensors in its turn; return its results.

        Args:
            what: Name of the collective, for an error of ranks that do not agree.
        """
        if not self._in_turn:
            return collective(list(tensors))
        backend = self._matching
        if tf.executing_eagerly():
            if backend is not None:
                backend.match(what)
            return collective(list(tensors))
        graph = tf.compat.v1.get_default_graph()
        number, last = self._graphs.get(graph, (0, None))
        # Without the numbers of branches and traces, which differ between processes.
        function = re.sub(r"_\d+", "", getattr(graph, "name", "a graph"))
        name = f"{what} {number + 1} of {function}"

        def match() -> int:
            assert backend is not None
            backend.match(name)
            return 0

        before = self._token.read_value()
        # After all tensors are computed: a thread that waits for other ranks earlier
        # could be the one that must compute them.
        waited = [before, *tensors, *([] if last is None else [last()])]
        waited = [w for w in waited if w is not None]
        if backend is not None:
            with tf.control_dependencies(waited):
                waited = [tf.numpy_function(match, [], tf.int64, name="match")]
        with tf.control_dependencies(waited):
            results = collective([tf.identity(tensor) for tensor in tensors])
        with tf.control_dependencies(results):
            done = self._token.assign_add(0, read_value=False)
        self._graphs[graph] = number + 1, weakref.ref(done)
        return results


def _end(backend: weakref.ref[MatchedByOrder]) -> None:
    """Report to a rank that still waits in a collective that this process ends."""
    found = backend()
    if found is not None:
        found.match(END)
