"""A Keras model: makes its variables, and tells which methods and settings are the user's."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from collective.errors import CollectiveError
from collective.replacements import replacing
from collective.training.keras_compat.optimizers import (
    core_optimizer,
)

# Libraries whose functions by tf.function do not read variables of a model.
_LIBRARIES = ("collective.", "keras.", "tensorflow.")

#: The folder of Keras' code that is called for each variable.
BACKEND = os.path.join(os.path.dirname(keras.src.__file__), "backend", "")


def is_compiled(model: keras.Model) -> bool:
    """Return whether a script has asked XLA to compile the steps of a model.

    On a GPU Keras mostly asks it by itself, which nobody can tell from the model.
    """
    return bool(model.jit_compile) and not tf.config.list_physical_devices("GPU")


def build(
    model: keras.Model,
    spec: tuple[Any, Any, Any],
    optimizer: bool = True,
    training: bool = False,
) -> None:
    """Create every variable of model, loss, metrics and optimizer.

    The model is called as a step calls it: a ``Sequential`` that is built by the call keeps
    the value of ``training`` that it sees then.

    Args:
        model: A compiled model, in its backend's scope.
        spec: ``(x, y, sample_weight)``, trees of ``tf.TensorSpec`` of one batch.

    Raises:
        ValueError: Model, loss or metrics do not fit the data.
    """

    def symbolic(leaf: Any) -> keras.KerasTensor:
        kind: dict[str, Any] = {}
        if isinstance(leaf, tf.SparseTensorSpec):
            kind = {"sparse": True}
        elif isinstance(leaf, tf.RaggedTensorSpec):
            names = ("ragged_rank", "row_splits_dtype")
            kind = {"ragged": True} | {name: getattr(leaf, name) for name in names}
        return keras.KerasTensor(tuple(leaf.shape), leaf.dtype.name, **kind)

    x, y, sample_weight = (
        None if part is None else tf.nest.map_structure(symbolic, part) for part in spec
    )
    batch = (x, y) if sample_weight is None else (x, y, sample_weight)
    core = core_optimizer(model.optimizer)
    built = model.optimizer.built
    model.optimizer.built = built or not optimizer
    try:
        # A trace that is made before variables have values would keep their initial ones.
        with _retraced(), _called_as_in_step(model, training):
            model._symbolic_build(data_batch=batch)
    except Exception:
        model.optimizer.built = built or (optimizer and core.built)
        raise
    model.optimizer.built = built or optimizer


def _called_as_in_step(
    model: keras.Model, training: bool
) -> contextlib.AbstractContextManager[Any]:
    """Have ``_symbolic_build`` pass ``training`` as ``train_step`` or ``test_step`` does."""
    original = backend.compute_output_spec
    words = {"training": training} if takes_training(model) else {}

    def compute(function: Any, *args: Any, **kwargs: Any) -> Any:
        return original(function, *args, **(words if function is model else kwargs))

    return replacing(backend, "compute_output_spec", compute)


def fixed_rows(model: keras.Model) -> int | None:
    """Return the batch size that the model's inputs fix, or None."""
    inputs = getattr(model, "inputs", None) or []
    found = {i.shape[0] for i in inputs if getattr(i, "shape", None)}
    return found.pop() if len(found) == 1 else None


def call(model: keras.Model, x: Any, training: bool) -> Any:
    """Return the model's predictions; pass ``training`` if its ``call`` takes it.

    Raises:
        CollectiveError: As it was raised in a layer, without Keras' words around it.
    """
    try:
        return model(x, training=training) if takes_training(model) else model(x)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, CollectiveError):
            cause = cause.__context__
        if cause is None:
            raise
        raise cause from None


def takes_training(model: keras.Model) -> bool:
    """Return whether the model's ``call`` has a ``training`` argument."""
    return bool(model._call_has_training_arg)


def overrides(model: keras.Model, method: str) -> bool:
    """Return whether the user's class, or the model itself, replaces a Keras method."""
    of_class = getattr(type(model), method) is not getattr(keras.Model, method)
    return of_class or method in vars(model)


def compiled_arguments(model: keras.Model) -> dict[str, Any]:
    """Return losses, metrics and their weights, by the names of ``compile``'s arguments."""
    losses, metrics = model._compile_loss, model._compile_metrics
    return {
        "loss": model.loss,
        "loss_weights": getattr(losses, "_user_loss_weights", None),
        "metrics": getattr(metrics, "_user_metrics", None),
        "weighted_metrics": getattr(metrics, "_user_weighted_metrics", None),
    }


def compiled_settings(model: keras.Model) -> tuple[object, ...]:
    """Return the objects that ``compile`` has set; each call of it sets new ones."""
    names = ("optimizer", "_compile_loss", "_compile_metrics")
    return tuple(getattr(model, name, None) for name in names)


def other_optimizers(model: keras.Model) -> list[keras.Optimizer]:
    """Return optimizers that are attributes of the model or its layers, and not compiled."""
    found: dict[int, keras.Optimizer] = {}
    for layer in layers_of(model):
        for held in list(vars(layer).values()):
            values = held.values() if isinstance(held, dict) else held
            for value in values if isinstance(held, list | tuple | dict) else [held]:
                if isinstance(value, keras.Optimizer) and value is not model.optimizer:
                    found[id(value)] = value
    return list(found.values())


def tf_variable(variable: keras.Variable | tf.Variable) -> tf.Variable:
    """Return the TensorFlow variable of a Keras one; return any other as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def bytes_of(variable: Any) -> int:
    """Return the bytes of a whole variable, of Keras or TensorFlow."""
    elements = tf.TensorShape(variable.shape).num_elements() or 0
    return elements * tf.as_dtype(variable.dtype).size


def symbolic_inputs(model: keras.Model) -> Any:
    """Return the ``keras.Input`` that a model began with, as nested as given, or None."""
    functional = getattr(model, "_functional", None) or model  # of a Sequential
    return getattr(functional, "_inputs_struct", None)


def built_shapes(model: keras.Model) -> Any:
    """Return the shapes that a model was built for, as its inputs are nested, or None."""
    return (model.get_build_config() or {}).get("input_shape")


def path_of(variable: keras.Variable | tf.Variable) -> str:
    """Return the path of a Keras variable, or the name of a TensorFlow one."""
    return str(getattr(variable, "path", variable.name))


def layers_of(model: keras.Layer) -> list[keras.Layer]:
    """Return the model, or layer, and its layers, in the order of ``trainable_flags``."""
    return list(model._flatten_layers())


def trainable_flags(model: keras.Model) -> list[bool]:
    """Return whether each layer is trainable, in an order that does not depend on it."""
    return [bool(layer.trainable) for layer in layers_of(model)]


def set_trainable_flags(model: keras.Model, flags: Sequence[bool]) -> None:
    """Make layers trainable, or not, as ``trainable_flags`` returned it."""
    for layer, flag in zip(layers_of(model), flags, strict=True):
        if layer.trainable != bool(flag):
            layer.trainable = bool(flag)


def initial_epoch(model: keras.Model) -> int | None:
    """Return the epoch with which ``BackupAndRestore`` wants training to begin."""
    return getattr(model, "_initial_epoch", None)


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
    """Set the epoch that ``initial_epoch`` returns; after 0, it returns None."""
    model._initial_epoch = epoch or None


def is_validated(
    model: keras.Model, epoch: int, frequency: int | Sequence[int]
) -> bool:
    """Return whether ``validation_freq`` wants a validation after an epoch, from 0."""
    return bool(model._should_eval(epoch, frequency))


@contextlib.contextmanager
def assignments() -> Iterator[set[int]]:
    """Collect the ids of the Keras variables that are assigned inside.

    ``assign_add``, ``set_weights`` and an optimizer's setters end in ``_direct_assign``.
    """
    seen: set[int] = set()
    stock = keras.Variable._direct_assign

    def noting(self: keras.Variable, *args: Any, **kwargs: Any) -> Any:
        seen.add(id(self))
        return stock(self, *args, **kwargs)

    with replacing(keras.Variable, "_direct_assign", noting):
        yield seen


@contextlib.contextmanager
def before_assignments(action: Callable[[keras.Variable], None]) -> Iterator[None]:
    """Inside, call an action before a Keras variable is assigned."""
    stock = keras.Variable._direct_assign

    def noting(self: keras.Variable, *args: Any, **kwargs: Any) -> Any:
        action(self)
        return stock(self, *args, **kwargs)

    with replacing(keras.Variable, "_direct_assign", noting):
        yield


@contextlib.contextmanager
def before_metrics(action: Callable[[], None]) -> Iterator[None]:
    """Inside, call an action before Keras' loops read or reset the metrics of a model."""

    def noting(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def method(*args: Any, **kwargs: Any) -> Any:
            if tf.executing_eagerly():
                action()
            return stock(*args, **kwargs)

        return method

    kind = keras.Model
    with (
        replacing(kind, "reset_metrics", noting(kind.reset_metrics)),
        replacing(kind, "get_metrics_result", noting(kind.get_metrics_result)),
    ):
        yield


@contextlib.contextmanager
def logs_of_last_step() -> Iterator[None]:
    """Inside, the logs of an epoch are those of its last step; no metric is read.

    They are the same: a step of Keras returns the values of the metrics after it.
    """
    with replacing(keras.Model, "_get_metrics_result_or_logs", lambda self, logs: logs):
        yield


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of all metrics, also of metrics that the model does not list.

    A model may replace its property ``metrics``.
    """
    found = [*model.metrics, model._loss_tracker, model._compile_metrics]
    compiled = model._compile_loss
    found += [] if compiled is None else compiled.metrics
    found += [m for layer in layers_of(model) for m in layer._metrics]
    variables = [v for metric in found if metric is not None for v in metric.variables]
    return list({id(v): v for v in variables}.values())


def _retraced() -> contextlib.AbstractContextManager[Any]:
    """Have each call of a user's ``tf.function`` trace it, and keep nothing.

    It is used while a model is built: a trace of that time would keep the initial values of
    its variables.
    """
    original = polymorphic_function.Function.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if str(getattr(self.python_function, "__module__", "")).startswith(_LIBRARIES):
            return original(self, *args, **kwargs)
        return original(self._clone(None), *args, **kwargs)

    return replacing(polymorphic_function.Function, "__call__", call)


def compiled_objects(model: keras.Model) -> list[object]:
    """Return the objects that ``compile`` has made; each call of it makes new ones."""
    names = ("_compile_loss", "_compile_metrics", "_loss_tracker")
    return [getattr(model, name, None) for name in names]
