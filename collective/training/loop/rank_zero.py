"""Callbacks of ``evaluate`` and ``predict``: they run on rank 0, and every rank follows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import keras

from collective.backends.base import Backend
from collective.training.loop.callbacks import CallbackMethods, Callbacks
from collective.training.process.unit import Unit, at_once

Logs = Mapping[str, Any] | None


class OnRankZero(keras.callbacks.Callback):
    """The callback of each rank that runs those of rank 0.

    Args:
        verbose: What the callbacks read in their ``params``.
        unit: See ``CallbackMethods``.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        model: keras.Model,
        backend: Backend,
        verbose: str | int,
        unit: Unit = at_once,
    ):
        super().__init__()
        self._callbacks, self._of, self._backend = callbacks, model, backend
        self._verbose, self._calls = verbose, itertools.count()
        self._unit = unit
        self._methods: CallbackMethods | None = None

    def share_state(self) -> None:
        """Give every rank what rank 0's callbacks have gathered; every rank calls it."""
        if self._methods is not None:
            self._methods.share_state()

    def _begin(self, method: str) -> None:
        params = dict(self.params) | {"verbose": self._verbose}
        self._methods = CallbackMethods(
            self._callbacks, self._of, self._backend, params, self._unit
        )
        self._methods.agree()
        self._call(method, {})

    def _call(self, method: str, *args: Any) -> None:
        assert self._methods is not None
        self._methods.call(method, (next(self._calls),), *args)

    def on_test_begin(self, logs: Logs = None) -> None:
        """Begin an evaluation."""
        self._begin("on_test_begin")

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Begin a batch of an evaluation."""
        self._call("on_test_batch_begin", batch, {})

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        """End a batch of an evaluation."""
        self._call("on_test_batch_end", batch, logs)

    def on_test_end(self, logs: Logs = None) -> None:
        """End an evaluation."""
        self._call("on_test_end", logs)

    def on_predict_begin(self, logs: Logs = None) -> None:
        """Begin a prediction."""
        self._begin("on_predict_begin")

    def on_predict_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Begin a batch of a prediction."""
        self._call("on_predict_batch_begin", batch, {})

    def on_predict_batch_end(self, batch: int, logs: Logs = None) -> None:
        """End a batch of a prediction."""
        self._call("on_predict_batch_end", batch, logs)

    def on_predict_end(self, logs: Logs = None) -> None:
        """End a prediction."""
        self._call("on_predict_end", {})
