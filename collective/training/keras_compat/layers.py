"""How a model calls its layers, what they normalize by, and the masks of tensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import tensorflow as tf
from keras.src.backend.common import masking, stateless_scope
from keras.src.models.functional import Functional
from keras.src.ops.function import Function
from tensorflow.python.eager import record

from collective.replacements import replacing
from collective.training.keras_compat.wrapped_functions import refuse_in_block

_KERAS_MOMENTS = keras.layers.BatchNormalization._moments
Moments = Callable[[tf.Tensor, list[int], Any], tuple[tf.Tensor, tf.Tensor] | None]
mask_of, set_mask = masking.get_keras_mask, masking.set_keras_mask


@dataclass(frozen=True, eq=False)
class Node:
    """An operation in a functional model. Tensors are identified by a number."""

    operation: Any  # the layer
    name: str
    is_model: bool
    inputs: frozenset[int]
    # The tensors that it makes, with their bytes per row of the batch.
    outputs: dict[int, int]
    # Takes the values of its inputs, adds those of its outputs.
    compute: Callable[[dict[int, Any]], None]


@contextlib.contextmanager
def replace_layer_calls(
    model: keras.Model,
    graph: Callable[[list[Node], set[int], dict[int, Any]], None],
    one: Callable[[keras.Layer, Callable[[], Any]], Any],
) -> Iterator[None]:
    """Inside, replaces how a model, and the models in it, call their layers.

    Args:
        graph: Computes a functional model. Arguments: its nodes in order, the tensors
            that are its outputs, and the values of its inputs, to which it adds all
            others.
        one: Calls a layer of another model. Arguments: the layer and the call.
    """
    by_python = {id(layer) for layer in _called_by_python(model)}
    plain = keras.layers.Layer.__call__

    def call(self: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in by_python:
            return plain(self, *args, **kwargs)
        return one(self, lambda: plain(self, *args, **kwargs))

    def run(
        self: Function, inputs: Any, operation_fn: Any = lambda op: op, **_: Any
    ) -> Any:
        values = dict(
            zip(map(id, self.inputs), keras.tree.flatten(inputs), strict=True)
        )
        nodes, known = [], set(values)
        for depth in sorted(self._nodes_by_depth, reverse=True):
            for node in self._nodes_by_depth[depth]:
                needed = frozenset(map(id, node.input_tensors))
                if node.operation and not node.is_input and needed <= known:
                    nodes.append(_node(node, needed, operation_fn))
                    known |= set(nodes[-1].outputs)
        graph(nodes, set(map(id, self.outputs)), values)
        found = [values[id(x)] for x in self.outputs]
        return keras.tree.pack_sequence_as(self._outputs_struct, found)

    with (
        replacing(keras.layers.Layer, "__call__", call),
        replacing(Function, "_run_through_graph", run),
    ):
        yield


@contextlib.contextmanager
def around_layer_calls(
    layers: Sequence[keras.Layer], one: Callable[[keras.Layer, Any, Any, Any], Any]
) -> Iterator[None]:
    """Inside, replaces how these layers are called.

    Args:
        one: Takes the layer, a function that calls it, arguments and keywords.
    """
    chosen = set(map(id, layers))
    plain = keras.layers.Layer.__call__

    def call(self: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in chosen:
            return plain(self, *args, **kwargs)
        return one(self, lambda *a, **k: plain(self, *a, **k), args, kwargs)

    with replacing(keras.layers.Layer, "__call__", call):
        yield


def _node(node: Any, needed: frozenset[int], operation_fn: Any) -> Node:
    def compute(values: dict[int, Any]) -> None:
        args, kwargs = node.arguments.fill_in(values)
        made = operation_fn(node.operation)(*args, **kwargs)
        values.update(
            zip(map(id, node.outputs), keras.tree.flatten(made), strict=False)
        )

    return Node(
        node.operation,
        node.operation.name,
        isinstance(node.operation, keras.Model),
        needed,
        {id(x): _row_bytes(x) for x in node.outputs},
        compute,
    )


def _row_bytes(tensor: keras.KerasTensor) -> int:
    numbers = math.prod(d or 1 for d in tensor.shape)
    return numbers * tf.as_dtype(tensor.dtype).size


def layers_in_order(model: keras.Model) -> list[tuple[keras.Layer, int]] | None:
    """The layers of a Sequential or functional model, also of models in it.

    Returns:
        In the order of their first call, each with the bytes of its outputs per row;
        None for a model that calls its layers in Python.
    """
    inner = _functional(model)
    if inner is None:
        return None
    found: dict[int, tuple[keras.Layer, int]] = {}
    for depth in sorted(inner._nodes_by_depth, reverse=True):
        for node in inner._nodes_by_depth[depth]:
            operation = node.operation
            if operation is None or node.is_input:
                continue
            below = isinstance(operation, keras.Model) and layers_in_order(operation)
            made = sum(_row_bytes(x) for x in node.outputs)
            for layer, size in below or [(operation, made)]:
                before = found.get(id(layer), (layer, 0))[1]
                found[id(layer)] = layer, before + size
    return list(found.values())


def _functional(model: keras.Model) -> Functional | None:
    """The graph of a Sequential or functional model; None where Python code calls."""
    inner = getattr(model, "_functional", None) or model
    own_call = (
        not isinstance(inner, Functional) or type(inner).call is not Functional.call
    )
    return None if own_call else inner


def cut_tensor(tensor: tf.Tensor, begin: Any, end: Any) -> tf.Tensor:
    """The rows from ``begin`` to before ``end``, with those of the tensor's mask."""
    part, mask = tensor[begin:end], mask_of(tensor)
    if mask is not None:
        set_mask(part, mask[begin:end])
    return part


def copy_tensor(tensor: tf.Tensor) -> tf.Tensor:
    """A copy on the current device, with the tensor's mask."""
    copy, mask = tf.identity(tensor), mask_of(tensor)
    if mask is not None:
        set_mask(copy, tf.identity(mask))
    return copy


def _called_by_python(model: keras.Model) -> Iterator[keras.Layer]:
    """The layers that the user's Python code calls, also in models in the model."""
    by_graph = _functional(model) is not None
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if isinstance(layer, keras.Model):
            yield from _called_by_python(layer)
        elif not by_graph:
            yield layer


class Tape(Protocol):
    """What can be kept from recording, as a ``tf.GradientTape``."""

    def stop_recording(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, nothing is recorded."""
        ...


class _EveryTape:
    def stop_recording(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, no tape records."""
        stopped: contextlib.AbstractContextManager[Any] = record.stop_recording()
        return stopped


every_tape: Tape = _EveryTape()
in_stateless_scope = stateless_scope.in_stateless_scope


@contextlib.contextmanager
def written_afterwards(layers: Sequence[Any]) -> Iterator[None]:
    """A stateless scope for calls of layers, whose effects reach them when it ends."""
    found = {id(v): v for layer in layers for v in getattr(layer, "variables", ())}
    variables = [(v, tf.convert_to_tensor(v._value)) for v in found.values()]
    with keras.StatelessScope(variables, collect_losses=True) as scope:
        yield
    for variable, value in variables:
        new = scope.get_current_value(variable)
        if new is not value:
            variable.assign(new)
    losses = {id(loss): loss for loss in scope.losses}
    for layer in (inner for one in layers for inner in _with_inner(one)):
        for key in layer._loss_ids & set(losses):
            layer._loss_ids.remove(key)
            layer._losses.append(losses[key])


def _with_inner(layer: Any) -> list[Any]:
    return layer._flatten_layers() if isinstance(layer, keras.layers.Layer) else []


class InnerScope(keras.StatelessScope):
    """A stateless scope within the current one, which its effects do not reach."""

    reads_variables = False  # see ``wrapped_functions``

    def get_current_value(self, variable: keras.Variable) -> Any:
        """What reading a variable calls."""
        if self.reads_variables and variable.trainable:
            refuse_in_block(variable)
        return super().get_current_value(variable)

    def __init__(self) -> None:
        self.outer = stateless_scope.get_stateless_scope()
        super().__init__(collect_losses=self.outer.collect_losses)
        self.state_mapping = dict(self.outer.state_mapping)

    def effects(self, outputs: Any) -> tuple[list[Any], dict[int, Any], list[Any]]:
        """Effects of the calls inside: losses, new values, and masks of the outputs."""
        before = self.outer.state_mapping
        new = {i: v for i, v in self.state_mapping.items() if before.get(i) is not v}
        masks = [mask_of(t) for t in tf.nest.flatten(outputs)]
        return list(self.losses), new, masks

    def export(self, model: keras.Model, outputs: Any, effects: Any) -> None:
        """Repeats the effects in the outer scope, with tensors of the outer graph."""
        losses, new, masks = effects
        self.outer.state_mapping.update(new)
        for tensor, mask in zip(tf.nest.flatten(outputs), masks, strict=True):
            if mask is not None:
                set_mask(tensor, mask)
        for old, loss in zip(self.losses, losses, strict=True):
            self.outer.add_loss(loss)
            for layer in model._flatten_layers():
                if id(old) in layer._loss_ids:
                    layer._loss_ids.remove(id(old))
                    layer._loss_ids.add(id(loss))


def batch_norm_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """The model's layers of batch normalization, nested ones too."""
    kind = keras.layers.BatchNormalization
    return [layer for layer in model._flatten_layers() if isinstance(layer, kind)]


@contextlib.contextmanager
def replace_moments(moments: Moments, every_layer: bool) -> Iterator[None]:
    """Inside, replaces how layers of batch normalization compute their statistics.

    Args:
        moments: Takes ``(inputs, axes, mask)`` and returns mean and variance, without
            the dimensions ``axes``; or None to leave it to Keras.
        every_layer: False: only layers with ``synchronized=True``.
    """
    layer_type = keras.layers.BatchNormalization
    keras_moments = layer_type._moments

    def replaced(self: Any, inputs: tf.Tensor, mask: Any) -> Any:
        found = None
        if every_layer or self.synchronized:
            found = moments(inputs, list(self._reduction_axes), mask)
        return keras_moments(self, inputs, mask) if found is None else found

    with replacing(layer_type, "_moments", replaced):
        yield


def stock_moments() -> contextlib.AbstractContextManager[Any]:
    """Inside, batch normalization computes its statistics as Keras does."""
    layer_type = keras.layers.BatchNormalization
    return replacing(layer_type, "_moments", _KERAS_MOMENTS)


def masked_moments(
    count: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """What Keras makes of statistics of masked inputs: it divides by count + epsilon.

    Args:
        count: Scalar, inputs that are not masked.
        mean, variance: Of these.
    """
    share = count / (count + tf.cast(keras.config.epsilon(), count.dtype))
    keras_mean = mean * share
    return keras_mean, (variance + tf.square(mean - keras_mean)) * share
