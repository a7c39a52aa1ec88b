"""What a traced function writes, and whether rows of the batch have a part in it.

What is computed from the model's variables alone, as a moving average of its weights, is
the same on every replica and needs no sum. Of micro-batches only the last one's counts: it
sees the updated weights.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

_ASSIGNS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
_READ = "ReadVariableOp"
_OTHERWISE = None


# By these, collectives in graphs have an order.
_ORDER = "collective_order"


def written_variables(graph: Any) -> list[tf.Variable]:
    """The variables of others that a function writes.

    Args:
        graph: The ``FuncGraph`` of the function. Branches and loops inside are included.

    Returns:
        In the order in which the function first uses them: the same on every rank,
        unlike that of ``graph.variables``.
    """
    written = set()
    for operation in graph.get_operations():
        _, writes = auto_control_deps_utils.get_read_write_resource_inputs(operation)
        written |= {handle.ref() for handle in writes}
    others = [v for v in graph.variables if not v.name.startswith(_ORDER)]
    variables = {id(v.handle): v for v in others}
    handles = [id(outer) for outer, inner in graph.captures if inner.ref() in written]
    return [variables[handle] for handle in handles if handle in variables]


def following(
    graph: Any, written: Sequence[tf.Variable], updated: Collection[int]
) -> list[tf.Variable]:
    """The variables whose new values no row of the batch has a part in.

    Args:
        graph: The ``FuncGraph`` of a step, whose arguments depend on rows.
        written: Variables that it writes, but for ``updated``.
        updated: Ids of those that optimizers have updated by sums over replicas.
    """
    of_handle = {id(v.handle): v for v in graph.variables}
    variables = {
        inner.ref(): of_handle[id(outer)]
        for outer, inner in graph.captures
        if id(outer) in of_handle
    }
    values = _values(graph, variables)
    changing = set(values) - set(updated)  # variables of metrics are among them
    found = [v for v in written if id(v) in values and _OTHERWISE not in values[id(v)]]
    while True:  # one may follow from another
        rows = _Rows(graph, variables, changing - {id(v) for v in found})
        kept = [v for v in found if not any(map(rows.reach, values[id(v)]))]
        if len(kept) == len(found):
            return kept
        found = kept


def _values(graph: Any, variables: dict[Any, tf.Variable]) -> dict[int, list[Any]]:
    """References to what is assigned, by the id of the variable."""
    values: dict[int, list[Any]] = {}
    for operation in graph.get_operations():
        _, writes = auto_control_deps_utils.get_read_write_resource_inputs(operation)
        for handle in writes:
            if handle.ref() in variables:
                plain = operation.type in _ASSIGNS
                value = operation.inputs[1].ref() if plain else _OTHERWISE
                values.setdefault(id(variables[handle.ref()]), []).append(value)
    return values


class _Rows:
    """Finds out which tensors of a graph depend on rows.

    Args:
        variables: By the tensor of their handle.
        changing: Ids of those that depend on rows.
    """

    def __init__(
        self, graph: Any, variables: dict[Any, tf.Variable], changing: set[int]
    ):
        self._variables, self._changing = variables, changing
        constant = {inner.ref() for outer, inner in graph.captures if _is_eager(outer)}
        self._arguments = {t.ref() for t in graph.inputs} - constant

    def reach(self, reference: Any) -> bool:
        """Whether rows, or random numbers, have a part in a tensor."""
        waiting, seen = [reference.deref()], set()
        while waiting:
            tensor = waiting.pop()
            operation = tensor.op
            if tensor.ref() in self._arguments:
                return True
            if operation in seen or operation.type == "VarHandleOp":
                continue
            seen.add(operation)
            if operation.type == _READ:
                variable = self._variables.get(operation.inputs[0].ref())
                if variable is None or id(variable) in self._changing:
                    return True
            elif operation.op_def.is_stateful:
                return True
            else:
                waiting += operation.inputs
        return False


def _is_eager(tensor: Any) -> bool:
    return hasattr(tensor, "numpy")
