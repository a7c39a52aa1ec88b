"""Counts of steps: variables that go up by one are the same on all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_MOST_OPS = 64  # a count needs a handful
_READS = ("ReadVariableOp", "VarHandleOp")


def is_own_successor(tensor: tf.Tensor, variable: Any) -> bool:
    """Whether a whole number is computed from one variable and the number 1 alone.

    Of a variable that is the same on all ranks, so is such a tensor: ``steps + 1``.
    Other constants may be different on each rank. Only a graph shows how a tensor is
    computed; of an eager one this is not known.
    """
    if tf.executing_eagerly() or not tensor.dtype.is_integer:
        return False
    handles = [
        v.handle for v in getattr(variable, "values", ()) if hasattr(v, "handle")
    ]
    waiting, seen = [tensor], set[int]()
    while waiting:
        found = waiting.pop()
        if any(found is handle for handle in handles):
            continue
        if not hasattr(found, "graph"):
            return False  # an eager tensor that is none of the handles
        if id(found.op) in seen:
            continue
        seen.add(id(found.op))
        if len(seen) > _MOST_OPS:
            return False
        if found.op.type == "Placeholder":
            outer = _captured(found)
            if outer is None:
                return False  # an argument
            waiting.append(outer)
        elif found.op.type == "Const":
            if tf.get_static_value(found) != 1:
                return False
        elif found.op._is_stateful and found.op.type not in _READS:
            return False
        else:
            waiting += found.op.inputs
    return True


def _captured(placeholder: tf.Tensor) -> Any:
    """What a placeholder stands for: a tensor outside of the function, or None."""
    captures = getattr(placeholder.graph, "captures", ())
    return next((outer for outer, inner in captures if inner is placeholder), None)
