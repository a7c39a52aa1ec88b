"""Keras' metrics, run without touching their variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.replacements import replacing
from collective.training.keras_compat.model import tf_variable


def loss_trackers(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics that track the losses of single outputs, in the order of losses."""
    compiled = model._compile_loss
    return list(compiled.metrics) if compiled is not None else []


def metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The model's metrics, without those that track its losses."""
    trackers = [id(m) for m in loss_trackers(model)]
    if getattr(model, "_loss_tracker", None) is not None:
        trackers.append(id(model._loss_tracker))
    return [m for m in model.metrics if id(m) not in trackers]


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables of all metrics, also of those that the model does not list.

    A model may replace its property ``metrics``.
    """
    found = [*model.metrics, model._loss_tracker, model._compile_metrics]
    found += loss_trackers(model)
    found += [m for layer in model._flatten_layers() for m in layer._metrics]
    variables = [v for metric in found if metric is not None for v in metric.variables]
    return list({id(v): v for v in variables}.values())


@contextlib.contextmanager
def scalar_means(share: tf.Tensor) -> Iterator[None]:
    """Inside, ``keras.metrics.Mean`` takes a scalar for a mean over rows.

    Keras counts a scalar as one value, whatever the number of rows it was made of. Here
    it counts by its rows' share of the global batch, so that sums over replicas give
    one value of the global batch.

    Args:
        share: Scalar, rows of the batch / rows of the global batch.
    """
    update_state = keras.metrics.Mean.update_state

    def update(self: Any, values: Any, sample_weight: Any = None) -> None:
        if sample_weight is None:
            values = keras.ops.convert_to_tensor(values)
            if not values.shape.rank:
                sample_weight = tf.cast(share, self.dtype)
        update_state(self, values, sample_weight)

    with replacing(keras.metrics.Mean, "update_state", update):
        yield


def metric_sums(
    model: keras.Model, state: Sequence[tf.Tensor], *batch: Any
) -> list[tf.Tensor]:
    """The values of the metrics' variables after one more batch.

    Args:
        state: Values of the variables of ``metrics(model)`` before the batch.
        batch: ``x, y, y_pred, sample_weight``.

    Returns:
        The values after it. No variable is written or read. Keras computes results,
        too, also those of its loss trackers, and to read these is a collective under a
        strategy.
    """
    variables = [v for m in metrics(model) for v in m.variables]
    mapping = [(v, tf.zeros(v.shape, v.dtype)) for v in metric_variables(model)]
    mapping += zip(variables, state, strict=True)
    with keras.StatelessScope(state_mapping=mapping) as scope:
        model.compute_metrics(*batch)
    return [scope.get_current_value(v) for v in variables]


def metric_results(model: keras.Model, state: Sequence[Any]) -> dict[str, Any]:
    """The results of ``metrics(model)`` for given values of their variables.

    Only the given values are read: to read a metric's own variable is a collective
    under a strategy, and this runs on rank 0 alone.

    Returns:
        Floats, or arrays where a metric has several results, under Keras' names.
    """
    found = metrics(model)
    return _results(found, [v for m in found for v in m.variables], state)


def write_metrics(
    model: keras.Model, state: Sequence[Any], loss: float, rows: float
) -> None:
    """Gives the model's metrics the values that Keras' own step leaves in them.

    Callbacks and scripts read them: a confusion matrix, the number of positives. Nothing
    under a strategy of TensorFlow, where each replica has a part of a metric.

    Args:
        state: Of the variables of ``metrics(model)``.
        loss: The mean over so many rows, which the metric of the loss has seen.
    """
    pairs = zip((v for m in metrics(model) for v in m.variables), state, strict=True)
    found: list[tuple[keras.Variable, Any]] = list(pairs)
    if (tracker := model._loss_tracker) is not None and tracker in model.metrics:
        found += [(tracker.total, loss * rows), (tracker.count, rows)]
    for variable, value in found:
        if not isinstance(tf_variable(variable), tf.distribute.DistributedValues):
            variable.assign(value)


def all_results(
    model: keras.Model, variables: Sequence[keras.Variable], values: Sequence[Any]
) -> dict[str, Any]:
    """As ``metric_results``, with those that track losses.

    Metrics that have not been used yet are left out.
    """
    used = [m for m in model.metrics if getattr(m, "built", True)]
    return _results(used, variables, values)


def result_of(
    metric: keras.metrics.Metric,
    variables: Sequence[keras.Variable],
    values: Sequence[Any],
) -> Any:
    """``metric.result()`` where the variables have these values; a tensor, or a dict."""
    mapping = list(zip(variables, values, strict=True))
    with keras.StatelessScope(state_mapping=mapping):
        result = metric.result()
        if isinstance(result, dict):
            return {k: keras.ops.convert_to_tensor(v) for k, v in result.items()}
        return keras.ops.convert_to_tensor(result)


def _results(
    found: Sequence[keras.metrics.Metric],
    variables: Sequence[keras.Variable],
    values: Sequence[Any],
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    mapping = list(zip(variables, values, strict=True))
    with keras.StatelessScope(state_mapping=mapping):
        for metric in found:
            results |= numbers({metric.name: metric.result()})
    return results


def numbers(results: dict[str, Any]) -> dict[str, Any]:
    """Flat, as Keras makes its logs: a metric may have a dictionary of results.

    Inside the scope of their values: a result may be a variable itself.
    """
    found: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, dict):
            found |= numbers(value)
        else:
            array = np.asarray(keras.ops.convert_to_tensor(value))
            found[name] = float(array) if array.ndim == 0 else array  # as of F1Score
    return found
