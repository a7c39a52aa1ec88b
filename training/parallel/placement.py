"""``--model-parallel D``: consecutive layers of a model on D devices of this process.

A device gets a run of layers, with their weights, gradients and the optimizer's state for
them, so that the largest device's share of the memory is as small as it can be. Tensors
go from one device to the next where one run ends and the next begins; backward, each
operation runs where the layer is whose gradient it computes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.keras_compat import Node

# Of a trained weight: itself, its gradient, and two of the optimizer's, as Adam's.
COPIES = 4


def of(model: keras.Model) -> Placement | None:
    """Where the layers of a model are; None: all on one device."""
    return getattr(model, "_placement", None)


def following(model: keras.Model, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; where the model is on several devices, in ``Placement.following``."""
    placement = of(model)
    if placement is None:
        return function

    def followed(*args: Any) -> Any:
        with placement.following():
            return function(*args)

    return followed


def check(backend: Backend, **with_options: bool) -> None:
    """Refuses what cannot go together with layers on several devices.

    Args:
        backend: The backend.
        with_options: Other options by name, and whether they were asked for.

    Raises:
        UsageError: If one of them was.
    """
    asked = [name for name, on in with_options.items() if on]
    if backend.tensor is not None:
        asked.append("tensor_parallel")
    if asked:
        raise UsageError(
            f"--{asked[0].replace('_', '-')} works on a model that is on one device, and "
            f"--model-parallel {len(backend.stages)} places it on several",
            hint="drop one of them",
        )


class Placement:
    """Puts the layers of a model on devices.

    Args:
        model: Built and compiled, but for its optimizer, which gets built here.
        devices: Names, as ``/gpu:0``.
        rows: That are computed at a time, on which the memory of activations depends.

    Attributes:
        devices: The names.
        shares: Estimated bytes on each.

    Raises:
        UsageError: The model is no Sequential or functional one, or has fewer layers
            than there are devices.
    """

    def __init__(self, model: keras.Model, devices: Sequence[str], rows: int):
        self.model, self.devices = model, list(devices)
        layers = keras_compat.layers_in_order(model)
        if model.optimizer.built:
            raise UsageError(
                "the optimizer has been built already, for weights on one device",
                hint="compile the model with a new optimizer before collective.training.fit",
            )
        if layers is None:
            raise UsageError(
                f"model {model.name!r} calls its layers in Python, so nobody knows their "
                "order before it runs",
                hint="--model-parallel takes a Sequential or functional model",
            )
        if len(layers) < len(devices):
            raise UsageError(
                f"model {model.name!r} has {len(layers)} layers, fewer than the "
                f"{len(devices)} devices of --model-parallel",
                hint=f"--model-parallel {max(1, len(layers))} or less",
            )
        sizes = [
            COPIES * sum(_bytes(v) for v in layer.variables) + rows * made
            for layer, made in layers
        ]
        ends = cut(sizes, len(devices))
        starts = [0, *ends[:-1]]
        self.shares = [sum(sizes[s:e]) for s, e in zip(starts, ends, strict=True)]
        self._stages: dict[int, int] = {}  # of layers
        self._of_variables: dict[int, int] = {}
        for stage, (start, end) in enumerate(zip(starts, ends, strict=True)):
            for layer, _ in layers[start:end]:
                self._stages[id(layer)] = stage
                for variable in layer.variables:
                    self._of_variables[id(variable)] = stage
                    keras_compat.move(variable, self.devices[stage])
        specs = [tf.DeviceSpec.from_string(device) for device in self.devices]
        self._by_place = {
            (s.device_type, s.device_index): i for i, s in enumerate(specs)
        }
        keras_compat.build_optimizer(
            model.optimizer, model.trainable_variables, beside=True
        )
        keras_compat.update_beside(model.optimizer)
        model._placement = self

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """Inside, calls of the model run each layer on its device."""

        def graph(nodes: Sequence[Node], _: set[int], values: dict[int, Any]) -> None:
            for node in nodes:
                stage = self._stages.get(id(node.operation))
                if stage is None:  # a model, whose layers come in their turn
                    node.compute(values)
                    continue
                with tf.device(self.devices[stage]):
                    here = dict(values)
                    for tensor in node.inputs:
                        here[tensor] = keras_compat.copied(values[tensor])
                    node.compute(here)
                values.update({tensor: here[tensor] for tensor in node.outputs})

        with keras_compat.calls_replaced(self.model, graph, lambda layer, call: call()):
            yield

    def beside(
        self, tensors: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> list[tf.Tensor]:
        """The tensors, each on the device of its variable."""
        placed = []
        for tensor, variable in zip(tensors, variables, strict=True):
            stage = self._of_variables.get(id(variable), 0)
            with tf.device(self.devices[stage]):
                placed.append(tf.identity(tensor))
        return placed

    def following(self) -> contextlib.AbstractContextManager[Any]:
        """In a graph: inside, operations run where their inputs are.

        Where these are on several devices, on the first: the gradient of a layer comes
        from a later device, and meets there what the layer has kept.
        """
        return tf.compat.v1.get_default_graph().device(self._where)

    def _where(self, op: tf.Operation) -> str:
        if op.device or any(t.dtype == tf.resource for t in op.inputs):
            return op.device
        stages = []
        for tensor in op.inputs:
            spec = tf.DeviceSpec.from_string(tensor.op.device)
            stages.append(self._by_place.get((spec.device_type, spec.device_index)))
        known = [stage for stage in stages if stage is not None]
        return self.devices[min(known)] if known else ""


def cut(sizes: Sequence[float], parts: int) -> list[int]:
    """Cuts a sequence into runs, so that the sum of the largest is smallest.

    Args:
        sizes: One or more for each part, not negative.
        parts: Runs; none is empty.

    Returns:
        Where each ends, exclusively.
    """
    count = len(sizes)
    sums = [0.0]
    for size in sizes:
        sums.append(sums[-1] + size)
    # For each number of runs and of elements: the largest run, and where the last starts.
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(math.inf, 0)] * count]
    for part in range(1, parts + 1):
        row = [(math.inf, 0)] * (count + 1)
        for end in range(part, count + 1):
            row[end] = min(
                (max(best[-1][start][0], sums[end] - sums[start]), start)
                for start in range(part - 1, end)
            )
        best.append(row)
    ends, end = [], count
    for part in range(parts, 0, -1):
        ends.append(end)
        end = best[part][end][1]
    return ends[::-1]


def _bytes(variable: keras.Variable) -> int:
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
