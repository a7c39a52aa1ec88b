"""``--model-parallel D``: consecutive layers of a model on D devices of this process.

Each device gets a run of layers, with their weights, gradients and optimizer state. The
runs are cut so that the fullest device needs as little memory as possible. Activations
are copied from one device to the next between two runs; backward, each operation runs on
the device of the layer whose gradient it computes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.keras_compat.layers import LayerCall

# Per trained weight: itself, its gradient, and two of the optimizer, as Adam has.
COPIES = 4


class Placement:
    """Puts the layers of a model on devices.

    It keeps no reference to the model (``collective.training.model.prepared`` finds it by the
    model).

    Args:
        model: Built and compiled, but for its optimizer, which gets built here.
        devices: Names, as ``/gpu:0``.
        rows: Rows of a micro-batch, on which the memory of activations depends.
    """

    def __init__(self, model: keras.Model, devices: Sequence[str], rows: int):
        self.devices = list(devices)
        layers = keras_compat.layers.layers_in_order(model)
        if model.optimizer.built:
            raise UsageError(
                "the optimizer has been built already, for weights on one device",
                hint="compile the model with a new optimizer before collective.training.fit",
            )
        if layers is None:
            raise UsageError(
                f"model {model.name!r} calls its layers in Python, so their order is not "
                "known before it runs",
                hint="--model-parallel takes a Sequential or functional model",
            )
        if len(layers) < len(devices):
            raise UsageError(
                f"model {model.name!r} has {len(layers)} layers, fewer than the "
                f"{len(devices)} devices of --model-parallel",
                hint=f"--model-parallel {max(1, len(layers))} or less",
            )
        sizes = [
            COPIES * sum(map(keras_compat.model.bytes_of, _variables(layer)))
            + rows * made
            for layer, made in layers
        ]
        ends = cut_into_runs(sizes, len(devices))
        starts = [0, *ends[:-1]]
        self._layer_stages: dict[int, int] = {}  # by id
        for stage, (start, end) in enumerate(zip(starts, ends, strict=True)):
            for layer, _ in layers[start:end]:
                self._layer_stages[id(layer)] = stage
                for variable in _variables(layer):
                    keras_compat.model.move_variable(variable, self.devices[stage])
        specs = [tf.DeviceSpec.from_string(device) for device in self.devices]
        self._stages = {(s.device_type, s.device_index): i for i, s in enumerate(specs)}
        keras_compat.optimizers.build_optimizer(
            model.optimizer, model.trainable_variables, on_variable_devices=True
        )

    def updates(self, optimizer: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, an optimizer updates each variable on its device."""
        return keras_compat.optimizers.update_on_variable_devices(optimizer)

    @contextlib.contextmanager
    def layer_calls(self) -> Iterator[None]:
        """Inside, calls of the model run each layer on its device."""

        def graph(nodes: Sequence[LayerCall], values: dict[int, Any]) -> None:
            for node in nodes:
                stage = self._layer_stages.get(id(node.operation))
                if stage is None:  # a model: its own layers are called below
                    node.compute(values)
                    continue
                with tf.device(self.devices[stage]):
                    copies = dict(values)
                    for tensor in node.inputs:
                        copies[tensor] = keras_compat.layers.copy_tensor(values[tensor])
                    node.compute(copies)
                values.update({tensor: copies[tensor] for tensor in node.outputs})

        with keras_compat.layers.replace_layer_calls(graph):
            yield

    def operations_beside_inputs(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, operations added to the graph run where their inputs are.

        With inputs on several devices, that is the first one: the gradient of a layer
        comes from a later device to the one with the layer's kept activations.
        """
        return tf.compat.v1.get_default_graph().device(self._device_of)

    def _device_of(self, op: tf.Operation) -> str:
        if op.device or any(t.dtype == tf.resource for t in op.inputs):
            return op.device
        specs = [tf.DeviceSpec.from_string(_device_of_tensor(t)) for t in op.inputs]
        places = [(spec.device_type, spec.device_index) for spec in specs]
        known = [self._stages[place] for place in places if place in self._stages]
        return self.devices[min(known)] if known else ""


def cut_into_runs(sizes: Sequence[float], runs: int) -> list[int]:
    """Cut a sequence into runs so that the largest sum of a run is smallest.

    Dynamic programming over (number of runs, number of elements).

    Args:
        sizes: Not negative; at least one per run.
        runs: How many; none is empty.

    Returns:
        Where each run ends, exclusively.
    """
    sums = list(itertools.accumulate(sizes, initial=0.0))

    @functools.cache
    def best(run: int, end: int) -> tuple[float, int]:
        """Return the largest sum for the elements before ``end``, and the last run's start."""
        if run == 1:
            return sums[end], 0
        return min(
            (max(best(run - 1, start)[0], sums[end] - sums[start]), start)
            for start in range(run - 1, end)
        )

    ends, end = [], len(sizes)
    for run in range(runs, 0, -1):
        ends.append(end)
        end = best(run, end)[1]
    return ends[::-1]


def _device_of_tensor(tensor: tf.Tensor) -> str:
    """Return the device of a tensor; for a variable that was read, the variable's."""
    if tensor.op.device or tensor.op.type != "ReadVariableOp":
        return str(tensor.op.device)
    handle = tensor.op.inputs[0]
    while hasattr(handle, "op"):  # an input of the function, or of the one around it
        captures = getattr(handle.graph, "captures", [])
        handle = next((outer for outer, own in captures if own is handle), None)
    return "" if handle is None else str(handle.device)


def _variables(layer: Any) -> list[keras.Variable]:
    """Return the variables of a layer; a Keras operation has none."""
    return getattr(layer, "variables", [])
