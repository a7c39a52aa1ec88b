"""Keras variables of which this process holds a part, and which code sees whole.

Such a variable has the whole shape, and a ``StandIn`` as its TensorFlow variable, behind
which there is no memory. What is traced of it reads and writes the stand-in by its handle.
Code that runs eagerly reads its whole value and assigns whole values, through what holds
the part.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.optimizers.base_optimizer import BaseOptimizer
from tensorflow.python.eager import core
from tensorflow.python.ops import resource_variable_ops

from collective.errors import UsageError
from collective.replacements import replacing


class Holder(Protocol):
    """What holds the part of a variable."""

    path: str

    def whole(self) -> tf.Tensor:
        """Return the whole value; every rank calls it."""
        ...

    def write(self, value: tf.Tensor) -> None:
        """Keep this rank's part of a whole value; every rank calls it."""
        ...

    def traced_handle(self, own: Any) -> Any:
        """Return the handle by which a function that is traced uses the variable.

        Args:
            own: That of the stand-in, which is for functions that are made for parts.

        Raises:
            UsageError: Nothing would put the part in the place of the stand-in.
        """
        ...


class StandIn(resource_variable_ops.UninitializedVariable):
    """A TensorFlow variable whose value several ranks hold in parts."""

    def __init__(
        self, shape: Sequence[int], dtype: tf.DType, trainable: bool, holder: Holder
    ):
        self._holder = holder
        super().__init__(
            trainable=trainable, shape=tf.TensorShape(shape), dtype=dtype, name="held"
        )

    @property
    def holder(self) -> Holder:
        """Return what holds the part."""
        return self._holder

    @property
    def handle(self) -> Any:
        """Return the handle, which is for functions that are made for parts."""
        if tf.executing_eagerly() or in_stateless_scope():
            return self._own_handle
        return self._holder.traced_handle(self._own_handle)

    @property
    def _handle(self) -> Any:
        """Return the handle as ``handle`` does; never to an operation that runs eagerly.

        TensorFlow's operations in C would read by it, and find an empty tensor. After this
        exception they are called again with what the variable converts to.
        """
        if tf.executing_eagerly():
            raise core._FallbackException
        return self.handle

    @_handle.setter
    def _handle(self, handle: Any) -> None:
        self._own_handle = handle

    def is_initialized(self, name: str | None = None) -> Any:
        """Return whether there is a value: always, if code runs eagerly."""
        return tf.constant(True) if tf.executing_eagerly() else super().is_initialized()

    def _read_variable_op(self, *args: Any, **more: Any) -> Any:
        if tf.executing_eagerly():
            return self._holder.whole()
        return super()._read_variable_op(*args, **more)

    def assign(
        self,
        value: Any,
        use_locking: Any = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Assign a whole value."""
        if not tf.executing_eagerly():
            return super().assign(value, use_locking, name, read_value)
        given = tf.convert_to_tensor(value, self.dtype)
        if not given.shape.is_compatible_with(self.shape):
            raise ValueError(
                f"{self._holder.path} has the shape {self.shape}, and the value that is "
                f"assigned {given.shape}"
            )
        self._holder.write(given)
        return self

    def _on_whole(self, method: str, *args: Any, **more: Any) -> Any:
        """Call a method of a variable that has the whole value, and keep what it writes."""
        whole = tf.Variable(self._holder.whole())
        made = getattr(whole, method)(*args, **more)
        if method in _READS:
            return made
        self._holder.write(whole.value())
        return self

    def _serialize_to_tensors(self) -> Any:
        return {"VARIABLE_VALUE": self._holder.whole()}

    def _restore_from_tensors(self, restored: Any) -> Any:
        return self.assign(restored["VARIABLE_VALUE"])

    def _export_to_saved_model_graph(self, *args: Any, **more: Any) -> Any:
        raise UsageError(
            f"{self._holder.path!r} is held in parts, and only model.export writes such a "
            "variable into a SavedModel",
            hint="model.export(path)",
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise UsageError(
            f"{self._holder.path!r} is held in parts and cannot be copied",
            hint="keras.models.clone_model(model), and set_weights(model.get_weights())",
        )


def _eagerly_on_whole(name: str) -> Callable[..., Any]:
    stock = getattr(resource_variable_ops.UninitializedVariable, name)

    @functools.wraps(stock)
    def method(self: StandIn, *args: Any, **more: Any) -> Any:
        if tf.executing_eagerly():
            return self._on_whole(name, *args, **more)
        return stock(self, *args, **more)

    return method


_initialize = keras.Variable._initialize
_READS = {"sparse_read", "gather_nd"}
_WRITES = {
    *("assign_add", "assign_sub", "batch_scatter_update"),
    *(f"scatter_{how}" for how in ("add", "sub", "max", "min", "mul", "div", "update")),
    *(f"scatter_nd_{how}" for how in ("add", "sub", "max", "min", "update")),
    "_strided_slice_assign",
}
for _name in _READS | _WRITES:
    setattr(StandIn, _name, _eagerly_on_whole(_name))


def holder_of(variable: Any) -> Any:
    """Return what holds the part of a variable, or None if this process has it whole."""
    held = variable._value if isinstance(variable, keras.Variable) else variable
    return held.holder if isinstance(held, StandIn) else None


@contextlib.contextmanager
def made_whole(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Inside, variables that are held in parts are ordinary ones, with their whole values.

    What is written to them inside is lost. Every rank must read the same variables.
    """
    held = [(v, v._value) for v in variables if holder_of(v) is not None]
    for variable, stand_in in held:
        variable._value = tf.Variable(
            stand_in.holder.whole(), trainable=variable.trainable, name=variable.name
        )
    try:
        yield
    finally:
        for variable, stand_in in held:
            variable._value = stand_in


def is_deferred(variable: keras.Variable) -> bool:
    """Return whether a variable gets its first value later."""
    return variable._value is None


def shape_of(variable: keras.Variable, value: Any) -> tuple[int, ...]:
    """Return the shape of a variable while it gets its first value."""
    shape = value.shape if variable._shape is None else variable._shape
    return tuple(shape)


def first_value(variable: keras.Variable, value: Any) -> tf.Tensor:
    """Return the value with which a variable begins: a tensor, or what a function makes."""
    return tf.cast(value() if callable(value) else value, variable._dtype)


def hold(variable: keras.Variable, stand_in: StandIn) -> None:
    """Have a variable show a stand-in."""
    before, variable._value = getattr(variable, "_value", None), stand_in
    _as_before(variable, before)


def make_whole(variable: keras.Variable, value: tf.Tensor) -> None:
    """Have a variable be an ordinary one, with a first value."""
    before, variable._value = variable._value, None
    _initialize(variable, value)
    _as_before(variable, before)


def _as_before(variable: keras.Variable, before: Any) -> None:
    """Have an optimizer that was built know a variable by the number it had then."""
    if before is not None:
        variable._value._unique_id = before._unique_id


#: Takes a variable and its initial value, or a function of it; returns whether it has
#: initialized the variable.
Initialize = Callable[[keras.Variable, Any], bool]


@contextlib.contextmanager
def initialized_by(initialize: Initialize) -> Iterator[None]:
    """Inside, variables are initialized by a function, or by Keras if that returns False."""
    stock = keras.Variable._initialize

    def initialized(self: keras.Variable, value: Any) -> None:
        if not initialize(self, value):
            stock(self, value)

    with replacing(keras.Variable, "_initialize", initialized):
        yield


@contextlib.contextmanager
def owners_seen(
    of_layer: Callable[[Any], contextlib.AbstractContextManager[Callable[[Any], None]]],
    of_optimizer: Callable[[Any], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Inside, contexts are entered around what makes a variable of a layer or optimizer.

    Args:
        of_layer: Called with a layer around ``add_weight``; yields a function that gets
            the variable.
        of_optimizer: Called with the weight that the variable belongs to, or None.
    """
    stock = keras.layers.Layer.add_weight
    add, refer = BaseOptimizer.add_variable, BaseOptimizer.add_variable_from_reference

    @functools.wraps(stock)
    def add_weight(self: Any, *args: Any, **more: Any) -> Any:
        with of_layer(self) as note:
            variable = stock(self, *args, **more)
        note(variable)
        return variable

    @functools.wraps(add)
    def add_variable(self: Any, *args: Any, **more: Any) -> Any:
        with of_optimizer(None):
            return add(self, *args, **more)

    @functools.wraps(refer)
    def from_reference(
        self: Any, reference_variable: Any, *args: Any, **more: Any
    ) -> Any:
        with of_optimizer(reference_variable):
            return refer(self, reference_variable, *args, **more)

    with (
        replacing(keras.layers.Layer, "add_weight", add_weight),
        replacing(BaseOptimizer, "add_variable", add_variable),
        replacing(BaseOptimizer, "add_variable_from_reference", from_reference),
    ):
        yield
