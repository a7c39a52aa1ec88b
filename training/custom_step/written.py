"""Which variables a traced function writes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils


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
    variables = {id(v.handle): v for v in graph.variables}
    handles = [id(outer) for outer, inner in graph.captures if inner.ref() in written]
    return [variables[handle] for handle in handles if handle in variables]
