"""Results of a model's metrics for given values of their variables, as Keras' ``fit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np


def result_of(
    metric: keras.metrics.Metric,
    variables: Sequence[keras.Variable],
    values: Sequence[Any],
) -> Any:
    """``metric.result()`` where the variables have these values; a tensor, or a dict."""

    def own(value: Any, variable: keras.Variable) -> Any:
        return keras.ops.convert_to_tensor(value, variable.dtype)

    mapping = [(v, own(x, v)) for v, x in zip(variables, values, strict=True)]
    with keras.StatelessScope(state_mapping=mapping):
        result = metric.result()
        if isinstance(result, dict):
            return {k: keras.ops.convert_to_tensor(v) for k, v in result.items()}
        return keras.ops.convert_to_tensor(result)


def all_results(
    model: keras.Model, variables: Sequence[keras.Variable], values: Sequence[Any]
) -> dict[str, Any]:
    """The results of all metrics of a model, under Keras' names.

    Returns:
        Floats, or arrays where a metric has several results. Without metrics that have
        not been used yet.
    """
    results: dict[str, Any] = {}
    for metric in model.metrics:
        if not getattr(metric, "built", True):
            continue
        result = result_of(metric, variables, values)
        results |= result if isinstance(result, dict) else {metric.name: result}
    arrays = {name: np.asarray(value) for name, value in results.items()}
    return {n: float(a) if a.ndim == 0 else a for n, a in arrays.items()}
