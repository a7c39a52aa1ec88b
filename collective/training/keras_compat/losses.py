"""Keras' losses just before their mean."""

from __future__ import annotations

import contextlib
import inspect
from collections import UserList
from collections.abc import Callable, Iterable, Iterator, MutableSet
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss
from keras.src.losses.losses import LossFunctionWrapper

from collective.replacements import replacing

LossCall = Callable[[Any, Any, Any, Any], tf.Tensor]

# Rows of the batch on which the shape of a loss is found out: no other dimension of a
# tensor is a multiple of this prime.
_ROWS = 10007


class Unreduced(NamedTuple):
    """A loss without the mean at its end."""

    values: tf.Tensor  # what the loss returns for the rows; any shape
    # Sample weights or None; they need not have the rank of ``values``.
    weight: tf.Tensor | None
    mask: tf.Tensor | None
    reduction: str | None
    # Whether the number of values depends on the data, and not only on the number of
    # rows.
    counted: bool


@contextlib.contextmanager
def replace_losses(model: keras.Model, call: LossCall) -> Iterator[None]:
    """Inside, replaces how the compiled loss calls the loss of each output.

    ``call`` takes ``(loss, y_true, y_pred, sample_weight)``, returns a scalar. A loss that is called by one of these, or by user code, is left as it is.
    """
    compiled = model._compile_loss
    if compiled is None:
        yield
        return

    def replaced(entry: Any) -> Any:
        return entry._replace(
            loss=lambda y, y_pred, weight=None: call(entry.loss, y, y_pred, weight)
        )

    entries = [replaced(entry) for entry in compiled._flat_losses]
    with replacing(compiled, "_flat_losses", entries):
        yield


def unreduced(loss: Any, y: Any, y_pred: Any, weight: Any) -> Unreduced | tf.Tensor:
    """Calls a loss, and leaves out the mean at its end.

    Returns:
        The loss before its mean; its value where it is not a ``keras.losses.Loss``, or
        replaces ``Loss.__call__``.
    """
    plain = keras.losses.Loss
    if not isinstance(loss, plain) or type(loss).__call__ is not plain.__call__:
        return loss(y, y_pred, weight)
    own_call, reduce = loss.call, keras_loss.reduce_weighted_values
    found: list[Unreduced] = []
    depth, counted = 0, False

    def call(y: Any, y_pred: Any) -> Any:
        nonlocal depth, counted
        depth += 1
        try:
            if depth == 1:
                counted = _counted(loss, own_call, y, y_pred)
            return own_call(y, y_pred)
        finally:
            depth -= 1

    def outermost(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        if depth:  # a loss that this one calls
            return reduce(values, sample_weight, mask, reduction, dtype)

        def to(value: Any) -> Any:
            return None if value is None else keras.ops.convert_to_tensor(value, dtype)

        values = to(values)
        found.append(Unreduced(values, to(sample_weight), mask, reduction, counted))
        return tf.zeros([], values.dtype)

    with (
        replacing(loss, "call", call),
        replacing(keras_loss, "reduce_weighted_values", outermost),
    ):
        loss(y, y_pred, weight)
    (result,) = found
    return result


def _counted(loss: Any, call: Callable[..., Any], y: Any, y_pred: Any) -> bool:
    """Whether only the data decide how many values a loss returns.

    Keras' own losses return some for each row. Of others the shape is found out on a
    batch whose number of rows is known when the graph is made.
    """
    source = loss.fn if isinstance(loss, LossFunctionWrapper) else type(loss)
    if str(getattr(source, "__module__", "")).startswith("keras."):
        return False

    def spec(tensor: Any) -> tf.TensorSpec:
        return tf.TensorSpec([_ROWS, *tensor.shape[1:]], tensor.dtype)

    try:
        specs = [tf.nest.map_structure(spec, tree) for tree in (y, y_pred)]
        function = tf.function(call, autograph=False).get_concrete_function(*specs)
        shape = tf.TensorShape(function.structured_outputs.shape)
    except Exception:  # whatever user code raises for rows that are not there
        return True
    if shape.rank is None:
        return True
    return not (shape.is_fully_defined() or (shape.rank and shape[0] == _ROWS))


def same_rank(values: tf.Tensor, weight: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Gives values and weights the same rank, by Keras' own rule."""
    return keras_loss.squeeze_or_expand_to_same_rank(values, weight)


def compiled_loss(model: keras.Model, y: Any, y_pred: Any, weight: Any) -> Any:
    """The weighted sum of the compiled losses; None where none is compiled."""
    compiled = model._compile_loss
    return None if compiled is None else compiled(y, y_pred, weight)


def custom_loss(
    model: keras.Model,
    x: Any,
    y: Any,
    y_pred: Any,
    weight: Any,
    added: list[Any],
    training: bool,
) -> tf.Tensor:
    """The value of a user's own ``compute_loss``, given the added losses."""
    batch = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": weight}
    parameters = inspect.signature(model.compute_loss).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    compute = model.compute_loss if takes_all else model._compute_loss
    with replacing(model, "_losses_override", added), whole_losses():
        return compute(**batch, training=training)


@contextlib.contextmanager
def whole_losses() -> Iterator[None]:
    """Inside, a loss is that of its rows also in the scope of a ``tf.distribute`` strategy.

    There, Keras divides a loss by the number of replicas, and multiplies what it shows.
    """

    def unchanged(value: Any) -> Any:
        return value

    with (
        replacing(keras_loss, "scale_loss_for_distribution", unchanged),
        replacing(keras_loss, "unscale_loss_for_distribution", unchanged),
    ):
        yield


class _Ids(MutableSet[int]):
    """A set that Keras does not copy where it becomes an attribute of a layer."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids = set(ids)

    def __contains__(self, number: object) -> bool:
        return number in self._ids

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, value: int) -> None:
        """As of ``set``."""
        self._ids.add(value)

    def discard(self, value: int) -> None:
        """As of ``set``."""
        self._ids.discard(value)


@contextlib.contextmanager
def own_losses(model: keras.Model) -> Iterator[None]:
    """Inside, layers of a replica keep what they ``add_loss`` apart from other replicas'.

    Replicas of one process are threads that share the layers, and each clears what they
    have kept.
    """
    with contextlib.ExitStack() as stack:
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            for layer in model._flatten_layers():
                stack.enter_context(replacing(layer, "_losses", UserList()))
                if hasattr(layer, "_loss_ids"):  # not in every Keras
                    stack.enter_context(replacing(layer, "_loss_ids", _Ids()))
        yield
