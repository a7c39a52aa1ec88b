"""Functions that have a gradient of their own and read variables of the model.

``tf.custom_gradient`` asks such a function for the gradients of the *variables* that it
reads: ``tf.recompute_grad`` and with it ``keras.remat`` and ``keras.RematScope`` rely on
that. The values of a ``StatelessScope`` are tensors, whose gradients it would drop without
a word. So inside of such a function, trainable variables are read as variables.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import (
    get_stateless_scope,
    in_stateless_scope,
)
from tensorflow.python.ops import custom_gradient as tf_custom_gradient

from collective.errors import UsageError
from collective.replacements import replacing

# By these, TensorFlow runs a function of tf.custom_gradient.
_DECORATORS = ("_eager_mode_decorator", "_graph_mode_decorator")
_OURS = "collective."


def read_variables() -> contextlib.AbstractContextManager[Any]:
    """Inside, such functions set ``reads_variables`` of the scope that they are called in."""
    stack = contextlib.ExitStack()
    for name in _DECORATORS:
        original = getattr(tf_custom_gradient, name)
        stack.enter_context(replacing(tf_custom_gradient, name, _marking(original)))
    return stack


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    def decorator(function: Any, args: Any, kwargs: Any) -> Any:
        scope: Any = get_stateless_scope() if in_stateless_scope() else None
        ours = str(getattr(function, "__module__", "")).startswith(_OURS)
        if ours or not hasattr(scope, "reads_variables"):
            return original(function, args, kwargs)

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            before, scope.reads_variables = scope.reads_variables, True
            try:
                return function(*args, **kwargs)
            finally:
                scope.reads_variables = before

        return original(marked, args, kwargs)

    return decorator


def require_variable(variable: keras.Variable, is_assigned: bool = False) -> None:
    """Raises UsageError where a variable cannot be read as what it is."""
    if is_assigned:
        _refuse(variable, "a layer has assigned it")
    if not isinstance(variable._value, tf.Variable):
        _refuse(variable, "it is held in parts")


def refuse_in_block(variable: keras.Variable) -> NoReturn:
    """Raises UsageError: the gradient is taken with respect to tensors alone."""
    _refuse(
        variable,
        "its layer is computed in a block (recompute=True) or on the rows of all replicas",
    )


def _refuse(variable: keras.Variable, why: str) -> NoReturn:
    raise UsageError(
        f"{variable.path!r} is read by a function with a gradient of its own "
        f"(tf.custom_gradient, keras.remat), and {why}",
        hint="pass its value to the function as an argument; or leave out keras.remat",
    )
