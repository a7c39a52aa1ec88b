"""Shows Keras objects of a strategy's scope as if they were made without a strategy.

A variable of a ``tf.distribute`` strategy with one device in this process is a container
of one plain ``tf.Variable``. Inside ``one_copy`` Keras sees the plain variable, and
optimizers see no strategy. So code can run that a strategy would refuse, such as an
assignment in a step, and nothing is summed twice.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from tensorflow.python.distribute import distribute_lib

from collective.replacements import replacing

T = TypeVar("T")
Number = TypeVar("Number", float, int)


def outside_strategy(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function outside of any scope or replica of a strategy."""
    if not tf.distribute.has_strategy():
        return function(*args, **kwargs)
    with ThreadPoolExecutor(1) as thread:  # scopes are entered for one thread
        return thread.submit(function, *args, **kwargs).result()


@contextlib.contextmanager
def on_one_device() -> Iterator[None]:
    """Have Keras' own ``evaluate`` and ``predict`` run a strategy's model on one device.

    On several devices they cut a batch, and fail if it has fewer rows than there are
    devices. Variables are read from one device, too.
    """
    model, default = keras.Model, outside_strategy(tf.distribute.get_strategy)
    one = property(lambda _: default)
    with (
        replacing(TensorFlowTrainer, "distribute_strategy", one),
        replacing(model, "evaluate", _outside_strategy(model.evaluate)),
        replacing(model, "predict", _outside_strategy(model.predict)),
        replacing(keras.Variable, "__float__", number_of(float)),
        replacing(keras.Variable, "__int__", number_of(int)),
    ):
        yield


@contextlib.contextmanager
def whole_batches(model: keras.Model) -> Iterator[None]:
    """Have Keras' loops read whole batches for a model of a strategy's scope.

    They build no model inside. Its step does, as without a strategy.
    """
    default = outside_strategy(tf.distribute.get_strategy)
    one = property(lambda _: default)
    with (
        replacing(model, "_distribute_strategy", None),
        replacing(TensorFlowTrainer, "distribute_strategy", one),  # also in its scope
    ):
        yield


def _outside_strategy(method: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> T:
        return outside_strategy(method, *args, **kwargs)

    return call


def number_of(kind: type[Number]) -> Callable[[keras.Variable], Number]:
    """Return a ``Variable.__float__`` or ``__int__`` that accepts a copy on each device.

    Keras' own raises a TypeError then, as for ``float(optimizer.learning_rate)``.
    """
    return lambda variable: kind(tf.convert_to_tensor(variable.value).numpy())


@contextlib.contextmanager
def _outside_scopes() -> Iterator[None]:
    """Have no scope of a strategy make the variables that are made inside.

    A step that is traced without its strategy may run in the strategy's scope: to enter
    that again would make copies of each copy.
    """
    graph = tf.compat.v1.get_default_graph()
    local, before = graph._thread_local, graph._variable_creator_stack
    local._variable_creator_stack = [
        entry
        for entry in before
        if not getattr(entry[1], "__qualname__", "").startswith("StrategyExtended")
    ]
    try:
        yield
    finally:
        local._variable_creator_stack = before


@contextlib.contextmanager
def one_copy(model: keras.Model, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Have Keras' variables be the plain ones of this process' only device.

    Args:
        model: A model that was made in the strategy's scope.
        strategy: It has one device in this process. Variables that are made inside are
            made in its scope.
    """
    variable = keras.Variable
    initialize = variable._initialize

    def plain(self: Any) -> Any:
        value = vars(self).get("_value")
        parts = getattr(value, "values", None)
        return value if parts is None else parts[0]

    def initialize_in_scope(self: Any, value: Any) -> None:
        with tf.init_scope(), _outside_scopes(), strategy.scope():
            initialize(self, value)

    def set_of(name: str) -> Any:
        return lambda self, value: self.__dict__.__setitem__(name, value)

    replaced = (
        (variable, "_value", property(plain, set_of("_value"))),
        (variable, "_initialize", initialize_in_scope),
        (
            BaseOptimizer,
            "_distribution_strategy",
            property(
                lambda _: tf.distribute.get_strategy(),
                set_of("_distribution_strategy"),
            ),
        ),
        (model, "_distribute_strategy", None),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            new = not hasattr(owner, name)
            stack.enter_context(replacing(owner, name, value, new))
        yield


@contextlib.contextmanager
def first_copy(model: keras.Model, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Have all variables of a strategy be the plain ones of the first device.

    This includes ``tf.Variable``, because it is the context in which a strategy updates one
    copy. No scope of the strategy is entered inside.
    """
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        with one_copy(model, strategy), distribute_lib.UpdateContext(0):
            yield
    finally:
        distribute_lib._pop_per_thread_mode()


def container(variable: tf.Variable) -> tf.Variable:
    """Return the strategy's container of a variable's copies, or the variable itself."""
    values = getattr(variable, "values", None)
    if values is not None:
        return variable if len(values) > 1 else values[0]
    for owner in (variable, getattr(variable, "handle", None)):
        for name in ("_distributed_container", "_aggregating_container"):
            found = vars(owner).get(name) if hasattr(owner, "__dict__") else None
            if found is not None:
                return container(found())
    return variable


def copies(variable: tf.Variable) -> list[tf.Variable]:
    """Return the copies of a first device's variable that a step reads and writes.

    A strategy sums some variables over their copies when they are read, for example those
    of metrics. The first copy of such a variable has the value, and the others are zero
    (``follow_first``).
    """
    around = container(variable)
    values = list(getattr(around, "values", (variable,)))
    return values[:1] if _is_summed(around) else values


def follow_first(variables: Sequence[tf.Variable]) -> None:
    """Give the other copies their values after the first copy was written."""
    for variable in variables:
        around = container(variable)
        first, *others = getattr(around, "values", (variable,))
        for other in others:
            value = first.read_value()
            other.assign(tf.zeros_like(value) if _is_summed(around) else value)


def _is_summed(variable: tf.Variable) -> bool:
    return (
        hasattr(variable, "values")
        and variable.synchronization == tf.VariableSynchronization.ON_READ
        and variable.aggregation == tf.VariableAggregation.SUM
    )
