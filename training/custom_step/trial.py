"""What a step does with some rows: run for its results, and undone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from collective.training.keras_compat import path_of, record_applied, tf_variable
from collective.training.variables.compared import all_variables

Values = dict[str, np.ndarray]


@dataclass
class Trial:
    """What a step has done.

    Attributes:
        gradients: Those that optimizers applied, in order, by variable.
        metrics: Variables of the metrics afterwards.
        state: All other variables afterwards, but those that optimizers write.
    """

    gradients: Values
    metrics: Values
    logs: Values
    state: Values


def run(
    model: keras.Model, state: list[Any], step: Callable[[], dict[str, Any]]
) -> Trial:
    """Runs a step eagerly, which returns its logs, and writes ``state`` besides."""
    applied: list[tuple[str, Any, list[Any], list[Any]]] = []
    with record_applied(applied):
        logs = step()
    gradients, updated = {}, set()
    for number, (name, optimizer, grads, variables) in enumerate(applied):
        for variable, gradient in zip(variables, grads, strict=True):
            if gradient is not None:
                key = f"{path_of(variable)}|{name}|{number}"
                gradients[key] = _array(gradient)
        updated |= {id(tf_variable(v)) for v in [*variables, *optimizer.variables]}
    metrics = {id(tf_variable(v)): v for v in model.metrics_variables}
    others = {id(tf_variable(v)): v for v in [*all_variables(model), *state]}
    return Trial(
        gradients,
        {path_of(v): _array(v) for v in metrics.values()},
        {name: _array(value) for name, value in logs.items()},
        {
            f"{path_of(v)}|{place}": _array(v)
            for place, (key, v) in enumerate(others.items())
            if key not in updated and key not in metrics
        },
    )


@contextlib.contextmanager
def undone(model: keras.Model, state: list[Any]) -> Iterator[list[Any]]:
    """Afterwards, variables and plain attributes of the model are as before."""
    every = [*all_variables(model), *model.metrics_variables, *state]
    variables = list({id(tf_variable(v)): v for v in every}.values())
    values = [_array(v) for v in variables]
    plain = (bool, int, float, str, type(None))
    attributes = {k: v for k, v in vars(model).items() if isinstance(v, plain)}
    try:
        yield variables
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        for name, attribute in attributes.items():
            if getattr(model, name) is not attribute:
                setattr(model, name, attribute)


def _array(value: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(value))
