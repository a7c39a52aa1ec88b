"""What code writes while it runs eagerly, and the metrics that there are."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import keras
import tensorflow as tf

from collective.training import keras_compat
from collective.training.unedited.job import Job

_metrics: weakref.WeakSet[keras.metrics.Metric] = weakref.WeakSet()


class Write(NamedTuple):
    """A variable that was written, and its value before."""

    variable: Any
    before: tf.Tensor


def watch_metrics(job: Job) -> None:
    """From now on, ``live_metrics`` knows each metric that is made."""
    stock = keras.metrics.Metric.__init__

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _metrics.add(self)
        stock(self, *args, **kwargs)

    job.replace(keras.metrics.Metric, "__init__", init)


def live_metrics() -> list[keras.metrics.Metric]:
    """The metrics that the script and its models have."""
    return list(_metrics)


@contextlib.contextmanager
def recorded_writes() -> Iterator[dict[int, Write]]:
    """Inside, notes the variables that are written eagerly, in order, by id."""
    written: dict[int, Write] = {}

    def noting(stock: Any) -> Any:
        @functools.wraps(stock)
        def write(self: Any, *args: Any, **kwargs: Any) -> Any:
            if tf.executing_eagerly() and id(self) not in written:
                written[id(self)] = Write(self, tf.identity(self))
            return stock(self, *args, **kwargs)

        return write

    with contextlib.ExitStack() as stack:
        for owner, name in keras_compat.variable_writers():
            method = noting(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, method))
        yield written


def undo(written: dict[int, Write]) -> None:
    """Gives variables the values that they had."""
    for variable, before in written.values():
        variable.assign(before)
