"""``train_on_batch``, ``test_on_batch`` and ``predict_on_batch``, on each rank's rows."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from collective.training import keras_compat
from collective.training.unedited.job import Job
from collective.training.unedited.loops.check import agree
from collective.training.unedited.loops.step import RowStep, is_running


class _Compiled(NamedTuple):
    """A step, and what ``compile`` had set when it was made."""

    settings: tuple[Any, ...]
    step: RowStep


def replace_on_batch(job: Job) -> None:
    """Replaces the three methods, for every model there is and will be."""
    steps: weakref.WeakKeyDictionary[Any, dict[str, _Compiled]] = (
        weakref.WeakKeyDictionary()
    )

    def step_of(model: keras.Model, method: str) -> RowStep:
        settings = keras_compat.compiled_settings(model)
        mine = steps.setdefault(model, {})
        if method not in mine or not _same(mine[method].settings, settings):
            step = RowStep(
                job, _calling(model, method), f"{method} of {model.name!r}", True, agree
            )
            mine[method] = _Compiled(settings, step)
        return mine[method].step

    def trains(stock: Any, method: str) -> Any:
        def on_batch(
            self: Any,
            x: Any,
            y: Any = None,
            sample_weight: Any = None,
            class_weight: Any = None,
            return_dict: bool = False,
        ) -> Any:
            self._assert_compile_called(stock.__name__)
            if class_weight is not None:
                if sample_weight is not None:  # Keras' own error
                    return stock(self, x, y, sample_weight, class_weight)
                sample_weight = keras_compat.class_weights(y, class_weight)
            self.reset_metrics()
            logs = step_of(self, method)((x, y, sample_weight))
            logs = {
                name: float(value) if np.ndim(value) == 0 else value
                for name, value in sorted(logs.items())  # as Keras orders them
            }
            return logs if return_dict else keras_compat.in_metric_order(self, logs)

        return on_batch

    train = trains(keras.Model.train_on_batch, "train_step")
    test = trains(keras.Model.test_on_batch, "test_step")

    def test_on_batch(
        self: Any,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        return test(self, x, y, sample_weight, None, return_dict)

    def predict_on_batch(self: Any, x: Any) -> Any:
        found = step_of(self, "predict_step")((x,))
        return tf.nest.map_structure(np.asarray, found)

    for ours, name in (
        (train, "train_on_batch"),
        (test_on_batch, "test_on_batch"),
        (predict_on_batch, "predict_on_batch"),
    ):
        job.replace(keras.Model, name, _unless_nested(job, name, ours))


def _unless_nested(job: Job, name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    stock = getattr(keras.Model, name)

    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        nested = job.inside or is_running() or self.run_eagerly
        return (stock if nested else ours)(self, *args, **kwargs)

    return method


def _calling(model: keras.Model, method: str) -> Callable[[Any], Any]:
    weak = weakref.ref(model)

    def call(data: Any) -> Any:
        alive = weak()
        assert alive is not None, "it is being called"
        return getattr(alive, method)(data)

    return call


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(map(lambda a, b: a is b, one, other))
