"""The collectives of a job in one order, for backends that match them by order.

TensorFlow runs two stateful ops of a graph in any order if they share no resource. A
backend that matches collectives by name needs no order. Under any other, as MPI, each
collective reads and then writes one variable, which orders them also in branches and
loops; and before each one, the ranks compare what they are about to call.
"""

from __future__ import annotations

import atexit
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import MatchedByOrder

END = "the end of the program"


class Order:
    """Runs collectives in the order of the program, and checks that ranks agree.

    Args:
        backend: Of which collectives are run; without ``MatchedByOrder``, nothing is
            added to a collective.
    """

    def __init__(self, backend: Backend):
        self._backend: MatchedByOrder | None = None
        if not isinstance(backend, MatchedByOrder) or backend.size == 1:
            return
        self._backend = backend
        with tf.init_scope(), tf.device("CPU:0"):
            self._token = tf.Variable(0, trainable=False, name="collective_order")
        # Of each graph: its number of collectives and the op that ends the last one.
        self._graphs: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = (
            weakref.WeakKeyDictionary()
        )
        atexit.register(_end, weakref.ref(backend))

    def run(
        self,
        what: str,
        tensors: Sequence[tf.Tensor],
        collective: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """The results of a collective of tensors, in its turn.

        Args:
            what: What it is, for an error of ranks that do not agree.
        """
        backend = self._backend
        if backend is None:
            return collective(list(tensors))
        if tf.executing_eagerly():
            backend.match(what)
            return collective(list(tensors))
        graph = tf.compat.v1.get_default_graph()
        number, last = self._graphs.get(graph, (0, None))
        # Without the numbers of branches and traces, which differ between processes.
        function = re.sub(r"_\d+", "", getattr(graph, "name", "a graph"))
        name = f"{what} {number + 1} of {function}"

        def match() -> int:
            backend.match(name)
            return 0

        before = self._token.read_value()
        # Once all tensors are computed: a thread that waits for other ranks earlier
        # could be the one that computes them.
        waited = [before, *tensors, *([] if last is None else [last()])]
        with tf.control_dependencies([w for w in waited if w is not None]):
            matched = tf.numpy_function(match, [], tf.int64, name="match")
        with tf.control_dependencies([matched]):
            results = collective([tf.identity(tensor) for tensor in tensors])
        with tf.control_dependencies(results):
            done = self._token.assign_add(0, read_value=False)
        self._graphs[graph] = number + 1, weakref.ref(done)
        return results


def _end(backend: weakref.ref[MatchedByOrder]) -> None:
    """At the end of a process: a rank that still waits in a collective learns of it."""
    found = backend()
    if found is not None:
        found.match(END)
