"""The shared library of the ops, and names from inside TensorFlow.

All private names of TensorFlow (2.16 to 2.21) are imported here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

# The registry of the gradients of ops.
from tensorflow.python.framework import ops as _ops

# The control dependencies between ops that are added after a function was traced; no
# public interface lets an op say with which ops it must be ordered.
from tensorflow.python.framework.auto_control_deps import (
    register_acd_resource_resolver as register_acd_resource_resolver,
)

# The attributes of an op that are functions.
from tensorflow.python.framework.op_def_registry import get as _op_definition

# The bodies and branches of tf.cond, tf.while_loop, tf.switch_case, tf.map_fn.
from tensorflow.python.ops.control_flow_v2_func_graphs import (
    CondBranchFuncGraph,
    WhileBodyFuncGraph,
    WhileCondFuncGraph,
)

from collective import library
from collective.errors import CollectiveError

CONTROL_FLOW = (CondBranchFuncGraph, WhileBodyFuncGraph, WhileCondFuncGraph)


@functools.cache
def load_ops() -> Any:
    """Load the library of the ops, once; raise a CollectiveError if that fails."""
    library.load()
    path = library.path().with_name("libcollective_tensorflow.so")
    try:
        return tf.load_op_library(str(path))
    except (tf.errors.OpError, OSError) as error:
        raise CollectiveError(
            f"the TensorFlow ops do not load: {error}",
            hint=library.HINT,
        ) from error


def called_functions(op: tf.Operation) -> Iterator[str]:
    """Yield the names of the functions that an op of a graph calls."""
    for attribute in _function_attributes(op.type):
        value = op.get_attr(attribute)
        for function in value if isinstance(value, list) else [value]:
            yield function.name


@functools.cache
def _function_attributes(op_type: str) -> tuple[str, ...]:
    definition = _op_definition(op_type)
    if definition is None:
        return ()
    return tuple(
        attribute.name
        for attribute in definition.attr
        if attribute.type in ("func", "list(func)")
    )


def gradient_of(op: tf.Operation) -> Callable[..., Any] | None:
    """Return the function that adds an op's gradient to a graph, or None."""
    try:
        return _ops.get_gradient_function(op)
    except LookupError:
        return None


def definition_of(function: str) -> Any:
    """Return a function's ``FunctionDef``; None if TensorFlow does not know it."""
    from tensorflow.python.eager import context

    try:
        return context.get_function_def(function)
    except tf.errors.NotFoundError:
        return None
