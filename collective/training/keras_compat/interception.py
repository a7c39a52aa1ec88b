"""Calls that a user's own ``train_step`` makes, each with a hook.

The hooks are in place while the step is traced, or while it runs eagerly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss
from keras.src.metrics import reduction_metrics
from keras.src.optimizers.base_optimizer import BaseOptimizer
from tensorflow.python.autograph.core import converter
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.eager import record
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from collective.replacements import replacing
from collective.training.keras_compat.optimizers import (
    core_optimizer,
    rows_in_order,
)

# Functions of these packages are not the user's: they are left as they are.
_LIBRARIES = ("tensorflow", "keras", "collective")


class Hooks:
    """What happens at the intercepted calls; here, nothing is changed."""

    def on_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """``tape.gradient`` of variables, with no outer tape; none is None."""
        return gradients

    def on_apply(
        self, optimizer: keras.Optimizer, gradients: list[Any], variables: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """``optimizer.apply``; some gradients may be None.

        Returns:
            The gradients to apply, and operations that every write waits for.
        """
        return gradients, []

    def update(
        self,
        optimizer: keras.Optimizer,
        gradients: list[Any],
        variables: list[Any],
        apply: Callable[..., Any],
    ) -> Any:
        """After ``on_apply``: writes variables; here by ``optimizer.apply``."""
        return apply(optimizer, gradients, variables)

    def on_scalar(self, value: Any, weight: Any) -> tuple[Any, Any]:
        """A ``Mean`` or ``Sum`` given one number for the whole batch, and its weight."""
        return value, weight

    def on_loss(
        self, loss: Any, values: Any, weight: Any, mask: Any, reduction: str
    ) -> Any:
        """The reduced value of a Keras loss, and what it was made of."""
        return loss


class Source(NamedTuple):
    """The metric whose result a tensor is; its key where the result is a dict."""

    metric: keras.metrics.Metric
    key: str | None

    def part(self, result: Any) -> Any:
        """The part of the metric's result that the tensor is."""
        return result if self.key is None else result[self.key]


#: By the id of each tensor, which is kept: ids of the dead are used again.
Results = dict[int, tuple[Any, Source]]


@contextlib.contextmanager
def intercept(
    hooks: Hooks, metrics: Sequence[keras.metrics.Metric] = ()
) -> Iterator[Results]:
    """Inside, the calls of a step go through hooks.

    A ``tf.function`` of the user's that is called inside is inlined: a cached trace
    would be without hooks, or with those of another step.
    """
    results: Results = {}
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            stack.enter_context(replacing(owner, name, make(getattr(owner, name))))

        nested = _Nested()
        replace(tf.GradientTape, "gradient", lambda f: _gradient(f, hooks, nested))
        for name in ("jacobian", "batch_jacobian"):
            replace(tf.GradientTape, name, nested.entering)
        applying = _Nested()
        for optimizer in (BaseOptimizer, keras.optimizers.LossScaleOptimizer):
            replace(optimizer, "apply", lambda f: _apply(f, hooks, applying))
        for metric in (reduction_metrics.Mean, reduction_metrics.Sum):
            replace(metric, "update_state", lambda f: _update_state(f, hooks))
        for kind in {type(metric) for metric in metrics}:
            replace(kind, "result", lambda f: _result(f, results))
        replace(keras_loss, "reduce_weighted_values", lambda f: _reduce(f, hooks))
        replace(polymorphic_function.Function, "__call__", _inlined)
        yield results


@contextlib.contextmanager
def record_applied(
    applied: list[tuple[str, keras.Optimizer, list[Any], list[Any]]],
    update: bool = True,
) -> Iterator[None]:
    """Inside, notes what reaches optimizers: name, optimizer, gradients, variables.

    Used around ``intercept``, it sees what the hooks have made of the gradients: of the
    replicas of this process, at the first one.
    """
    original = BaseOptimizer.apply

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = applied_to(self, trainable_variables)
        if is_first_replica():
            # Where replicas meet, as in a LossScaleOptimizer, a gradient is those of all.
            copies = tf.distribute.get_strategy().experimental_local_results
            own = [copies(gradient)[0] for gradient in grads]
            applied.append((self.name, self, own, variables))
        return original(self, grads, trainable_variables) if update else None

    with replacing(BaseOptimizer, "apply", apply):
        yield


@contextlib.contextmanager
def record_differentiated(differentiated: list[Any]) -> Iterator[None]:
    """Inside, notes the trained variables of which ``tape.gradient`` takes gradients."""
    original = tf.GradientTape.gradient

    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **more: Any) -> Any:
        differentiated.extend(filter(is_trained, tf.nest.flatten(sources)))
        return original(tape, target, sources, *args, **more)

    with replacing(tf.GradientTape, "gradient", gradient):
        yield


def is_first_replica() -> bool:
    """Whether this is the first replica of this process, or where its replicas meet."""
    replica = tf.distribute.get_replica_context()
    return replica is None or (
        tf.get_static_value(replica.replica_id_in_sync_group) == 0
    )


def is_trained(source: Any) -> bool:
    """Whether something is a variable that training changes."""
    is_variable = isinstance(source, keras.Variable | tf.Variable)
    return is_variable and bool(source.trainable)


def function_class() -> type[Any]:
    """The class of what ``tf.function`` returns."""
    return polymorphic_function.Function


def is_users(function: Any) -> bool:
    """Whether a ``tf.function`` is of a user's own code."""
    body = function.python_function
    return (getattr(body, "__module__", None) or "").split(".")[0] not in _LIBRARIES


def computes_batches(function: Any) -> bool:
    """Whether a ``tf.function`` is of a user's own code, or a step of a Keras model."""
    module = getattr(function.python_function, "__module__", None) or ""
    return is_users(function) or module == "keras.src.backend.tensorflow.trainer"


class _Nested:
    """Whether a call is made by an intercepted one."""

    def __init__(self) -> None:
        self.inside = False

    def entering(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function; calls that it makes are nested."""

        def entered(*args: Any, **kwargs: Any) -> Any:
            before, self.inside = self.inside, True
            try:
                return function(*args, **kwargs)
            finally:
                self.inside = before

        return entered


def _gradient(original: Any, hooks: Hooks, nested: _Nested) -> Any:
    def gradient(
        tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
    ) -> Any:
        alone = not nested.inside
        result = nested.entering(original)(tape, target, sources, *args, **kwargs)
        if not alone or record.could_possibly_record():
            return result  # an outer tape differentiates it: not summed yet
        flat, variables = tf.nest.flatten(result), tf.nest.flatten(sources)
        places = [
            i
            for i, (g, v) in enumerate(zip(flat, variables, strict=True))
            if g is not None and isinstance(v, keras.Variable | tf.Variable)
        ]
        if places:
            summed = hooks.on_gradients(
                [flat[i] for i in places], [variables[i] for i in places]
            )
            for i, total in zip(places, summed, strict=True):
                flat[i] = total
        return tf.nest.pack_sequence_as(sources, flat)

    return gradient


def applied_to(optimizer: Any, variables: Any) -> list[Any]:
    """The variables that ``apply`` was given, or those the optimizer was built for."""
    if variables is None:
        variables = core_optimizer(optimizer)._trainable_variables
    return list(variables)


def _apply(original: Any, hooks: Hooks, nested: _Nested) -> Any:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if nested.inside:  # of the optimizer inside this one
            return original(self, grads, trainable_variables)
        variables = applied_to(self, trainable_variables)
        gradients, before = hooks.on_apply(self, list(grads), variables)
        with tf.control_dependencies(before), rows_in_order(self, gradients):
            update = nested.entering(hooks.update)
            return update(self, gradients, variables, original)

    return apply


def _update_state(original: Any, hooks: Hooks) -> Any:
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        if getattr(values, "shape", None) is None:
            values = keras.ops.convert_to_tensor(values)
        # A tensor is a number of rows, as in Keras' own step.
        if len(values.shape) == 0 and not tf.is_tensor(sample_weight):
            values, sample_weight = hooks.on_scalar(values, sample_weight)
        return original(self, values, sample_weight)

    return update_state


def _result(original: Any, results: Results) -> Any:
    def result(self: Any) -> Any:
        value = original(self)
        parts = value.items() if isinstance(value, dict) else [(None, value)]
        for key, tensor in parts:
            results[id(tensor)] = tensor, Source(self, key)
        return value

    return result


def _reduce(original: Any, hooks: Hooks) -> Any:
    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        loss = original(values, sample_weight, mask, reduction, dtype)
        return hooks.on_loss(loss, values, sample_weight, mask, reduction)

    return reduce_weighted_values


def _inlined(original: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        body = self.python_function
        if not is_users(self):
            return original(self, *args, **kwargs)
        if not self._autograph:
            return body(*args, **kwargs)
        options = converter.ConversionOptions(recursive=True, user_requested=True)
        return autograph.converted_call(body, args, kwargs, options=options)

    return call
