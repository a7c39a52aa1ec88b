"""Functions of the user's that TensorFlow wraps, and that read variables of the model.

``tf.custom_gradient`` asks such a function for the gradients of the *variables* that it
reads: ``tf.recompute_grad`` and with it ``keras.remat`` and ``keras.RematScope`` rely on
that. ``tf.function`` keeps what it has traced, with the tensors that it has found. The
values of a ``StatelessScope`` are tensors: the one would drop their gradients without a
word, the other keep those of an earlier pass. So inside of such functions, variables are
read as variables.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import (
    get_stateless_scope,
    in_stateless_scope,
)
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.ops import custom_gradient as tf_custom_gradient

from collective.errors import UsageError
from collective.replacements import replacing

# By these, TensorFlow runs a function of tf.custom_gradient.
_DECORATORS = ("_eager_mode_decorator", "_graph_mode_decorator")
_OURS = "collective."
# Whose functions by tf.function read no variables of a model.
_LIBRARIES = (_OURS, "keras.", "tensorflow.")


class ReadingScope(keras.StatelessScope):
    """A stateless scope that knows when it is read inside of such a function."""

    reads_variables = False

    def __enter__(self) -> Any:
        self._marks = _marks()
        self._marks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._marks.__exit__(*error)


def _marks() -> contextlib.AbstractContextManager[Any]:
    """Inside, such functions set ``reads_variables`` of the scope that they are called in."""
    stack = contextlib.ExitStack()
    call = _calling(polymorphic_function.Function.__call__)
    stack.enter_context(replacing(polymorphic_function.Function, "__call__", call))
    for name in _DECORATORS:
        original = getattr(tf_custom_gradient, name)
        stack.enter_context(replacing(tf_custom_gradient, name, _marking(original)))
    return stack


def traced_anew() -> contextlib.AbstractContextManager[Any]:
    """Inside, each call of a ``tf.function`` of the user's traces it, and keeps nothing.

    For a model that is built: its variables have no values yet, and a trace would keep
    those that they begin with.
    """
    original = polymorphic_function.Function.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_of(self.python_function, _LIBRARIES):
            return original(self, *args, **kwargs)
        return original(self._clone(None), *args, **kwargs)

    return replacing(polymorphic_function.Function, "__call__", call)


def _is_of(function: Any, modules: str | tuple[str, ...]) -> bool:
    return str(getattr(function, "__module__", "")).startswith(modules)


def _scope_of(function: Any, but: str | tuple[str, ...]) -> Any:
    """The scope in which a function is called; None for functions of some modules."""
    scope: Any = get_stateless_scope() if in_stateless_scope() else None
    marks = hasattr(scope, "reads_variables") and not _is_of(function, but)
    return scope if marks else None


@contextlib.contextmanager
def _reading(scope: Any) -> Iterator[None]:
    before, scope.reads_variables = scope.reads_variables, True
    try:
        yield
    finally:
        scope.reads_variables = before


def _calling(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = _scope_of(self.python_function, _LIBRARIES)
        with contextlib.nullcontext() if scope is None else _reading(scope):
            return original(self, *args, **kwargs)

    return call


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    def decorator(function: Any, args: Any, kwargs: Any) -> Any:
        scope = _scope_of(function, _OURS)
        if scope is None:
            return original(function, args, kwargs)

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with _reading(scope):
                return function(*args, **kwargs)

        return original(marked, args, kwargs)

    return decorator


def read_as_variables(
    tape: tf.GradientTape, trainable: Sequence[keras.Variable]
) -> list[tuple[int, tf.Variable]]:
    """The trainable variables that were read as such on a tape, by index.

    By such functions, and by what the user has traced before.
    """
    places = {}
    for place, variable in enumerate(trainable):
        value = variable._value
        # With the copies on the devices of a strategy.
        for one in (value, *getattr(value, "values", ())):
            places[id(one)] = place
    watched = tape.watched_variables()
    return [(places[id(v)], v) for v in watched if id(v) in places]


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
        f"{variable.path!r} is read by a function that TensorFlow wraps "
        f"(keras.remat, tf.custom_gradient, tf.function), and {why}",
        hint="pass its value to the function as an argument; or leave out the wrapper",
    )
