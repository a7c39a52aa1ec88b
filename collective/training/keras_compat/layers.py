"""The calls of a model's layers, and the masks of tensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import masking
from keras.src.layers.rnn.conv_lstm import ConvLSTMCell as ConvLSTMCell
from keras.src.models.functional import Functional
from keras.src.ops.function import Function

from collective.replacements import replacing

mask_of, set_mask = masking.get_keras_mask, masking.set_keras_mask


@dataclass(frozen=True, eq=False)
class LayerCall:
    """An operation in a functional model. Tensors are identified by a number."""

    operation: keras.Operation  # the layer
    inputs: frozenset[int]
    outputs: tuple[int, ...]
    # Takes the values of its inputs, and adds the values of its outputs.
    compute: Callable[[dict[int, Any]], None]


@contextlib.contextmanager
def replace_layer_calls(
    graph: Callable[[list[LayerCall], dict[int, Any]], None],
) -> Iterator[None]:
    """Replace the way in which functional models call their layers.

    Args:
        graph: Computes a model. Arguments: its nodes in order, and the values of its
            inputs, to which it adds all others.
    """

    def run(
        self: Function, inputs: Any, operation_fn: Any = lambda op: op, **_: Any
    ) -> Any:
        values = dict(
            zip(map(id, self.inputs), keras.tree.flatten(inputs), strict=True)
        )
        nodes: list[LayerCall] = []
        known = set(values)
        for depth in sorted(self._nodes_by_depth, reverse=True):
            for node in self._nodes_by_depth[depth]:
                needed = frozenset(map(id, node.input_tensors))
                if node.operation and not node.is_input and needed <= known:
                    nodes.append(_node(node, needed, operation_fn))
                    known |= set(nodes[-1].outputs)
        graph(nodes, values)
        found = [values[id(x)] for x in self.outputs]
        return keras.tree.pack_sequence_as(self._outputs_struct, found)

    with replacing(Function, "_run_through_graph", run):
        yield


def _node(node: Any, needed: frozenset[int], operation_fn: Any) -> LayerCall:
    def compute(values: dict[int, Any]) -> None:
        args, kwargs = node.arguments.fill_in(values)
        made = operation_fn(node.operation)(*args, **kwargs)
        values.update(
            zip(map(id, node.outputs), keras.tree.flatten(made), strict=False)
        )

    return LayerCall(node.operation, needed, tuple(map(id, node.outputs)), compute)


def _row_bytes(tensor: keras.KerasTensor) -> int:
    numbers = math.prod(d or 1 for d in tensor.shape)
    return numbers * tf.as_dtype(tensor.dtype).size


def layers_in_order(model: keras.Model) -> list[tuple[keras.Layer, int]] | None:
    """Return the layers of a Sequential or functional model, also of models in it.

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
    """Return the graph of a Sequential or functional model, or None for any other model."""
    inner = getattr(model, "_functional", None) or model
    own_call = (
        not isinstance(inner, Functional) or type(inner).call is not Functional.call
    )
    return None if own_call else inner


def copy_tensor(tensor: tf.Tensor) -> tf.Tensor:
    """Return a copy on the current device, with the tensor's mask."""
    copy, mask = tf.identity(tensor), mask_of(tensor)
    if mask is not None:
        set_mask(copy, tf.identity(mask))
    return copy
