"""Cuts the weights of a model along the model axis, before a step of it is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from collective.log import log
from collective.training.keras_compat.traced import traced
from collective.training.model.variables import optimizer_variables
from collective.training.partition.mesh.layouts import Layouts
from collective.training.preparation.prepare import is_built
from collective.training.sharding.finding import find, find_required
from collective.training.sharding.held import tracing
from collective.training.sharding.placing import Placing
from collective.training.sharding.waiting import waits
from collective.training.steps.batch_function import (
    BatchFunction,
    StepObserver,
    running,
)
from collective.training.steps.program import Kind


class ModelAxis(StepObserver):
    """Cuts variables that wait for their values (``--tensor-parallel``).

    Args:
        placing: What lays the variables out.
        is_required: Whether a model of which no weight is cut is refused.
    """

    def __init__(self, placing: Placing, is_required: bool):
        self._placing, self._is_required = placing, is_required

    def before_trace(self, function: BatchFunction, kind: Kind) -> None:
        """Cut what waits of a model and its optimizers; every rank calls it."""
        model = function.model
        if not self._placing.waits:
            return
        if not is_built(model):
            _build(getattr(model, function.name), kind)
        layouts = Layouts()
        if any(map(waits, model.variables)):
            layouts = self._layouts(model, _inputs_of(kind.spec))
        self._placing.settle([*model.variables, *optimizer_variables(model)], layouts)

    def _layouts(self, model: keras.Model, x: Any) -> Layouts:
        if self._is_required:
            return find_required(model, self._placing, x)
        layouts, why = find(model, self._placing, x)
        if layouts is None and self._placing.backend.rank == 0:
            log.warning("model %r is whole on each rank: %s", model.name, why)
        return layouts or Layouts()


def _build(step: Callable[[Any], Any], kind: Kind) -> None:
    """Trace a step, which makes the variables, and forget the graph.

    Keras makes the variables of such a model when it traces the first step.
    """

    def whole(*tensors: tf.Tensor) -> Any:
        return step(kind.packed(tensors))

    with tracing(runs=False), running():
        traced(whole).get_concrete_function(*kind.whole_specs())


def _inputs_of(spec: Any) -> Any:
    """Return what of a batch a model is called with, as Keras' own steps call it."""
    return spec[0] if isinstance(spec, tuple) and spec else spec
