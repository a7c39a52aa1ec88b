"""Ordinary Keras callbacks as an observer of the training loop.

A collective inside a callback would wait for ranks that do not call it; it raises
instead. ``collective.training.callbacks.hooks`` calls the hooks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.callbacks.hooks import BatchHooks, Callbacks, Hooks
from collective.training.observer import FinishedStep, Observer
from collective.training.position import Position


class RankZeroCallbacks(Observer):
    """Runs hooks on rank 0, and makes every rank follow what they decided.

    Attributes:
        hooks: Calls them, also those of the validation.
    """

    def __init__(
        self, callbacks: Callbacks, position: Position, params: dict[str, Any]
    ):
        self.position = position
        self.model = position.model
        self.backend = position.backend
        self.hooks = Hooks(callbacks, self.model, self.backend, params)
        self._batches = BatchHooks(self.hooks, "train")
        self._epoch = self._first = self._stop = 0
        self._logs: dict[str, Any] = {}  # of the last epoch
        # Which layers the step trains; until the first step.
        self._trained: list[bool] | None = keras_compat.trainable_flags(self.model)
        self.model.stop_training = False

    def begin(self) -> None:
        """Finds out which hooks matter, and calls ``on_train_begin``.

        There a callback may say with which epoch the training begins
        (``BackupAndRestore``).
        """
        self.hooks.agree()
        self.hooks.call("on_train_begin", (), {})
        initial = keras_compat.initial_epoch(self.model) or self.position.initial_epoch
        agreed = self.backend.broadcast_array(np.array([float(initial)]))
        self.position.initial_epoch = int(agreed[0])

    def reconfigured(self, root: int) -> None:
        """As ``begin``: another rank may have become rank 0."""
        self.begin()

    def begin_epoch(self, epoch: int, first: int, last: int) -> None:
        """Calls ``on_epoch_begin``."""
        self._epoch, self._first, self._stop = epoch, first, last
        self.hooks.call("on_epoch_begin", (epoch,), epoch, {})

    def before_input(self, number: int) -> None:
        """Calls ``on_train_batch_begin``.

        Raises:
            UsageError: A callback has changed which layers are trained.
        """
        if self._trained is not None:
            if self._trained != keras_compat.trainable_flags(self.model):
                raise UsageError(
                    "a callback's on_train_begin, or another hook before the first step, has "
                    "changed layer.trainable",
                    hint="set it before collective.fit, and compile the model",
                )
            self._trained = None
        self._batches.before(number - self._first, self._epoch)

    def after_step(self, step: FinishedStep) -> None:
        """Calls ``on_train_batch_end``."""
        last = step.number + 1 == self._stop
        if self._batches.ends(step.number - self._first, last):
            self._end_batches()

    def before_validation(self) -> None:
        """Calls ``on_train_batch_end`` where the epoch ended unexpectedly."""
        self._end_batches()

    def end_epoch(self, epoch: int, logs: dict[str, float]) -> None:
        """Calls ``on_epoch_end``, and takes over what callbacks add to the logs."""
        self._end_batches()
        self.hooks.call("on_epoch_end", (epoch,), epoch, logs)
        agreed = self.hooks.agreed_logs("on_epoch_end", logs)
        if agreed is not logs:
            logs.clear()
            logs.update(agreed)
        self._logs = dict(logs)

    def end(self) -> None:
        """Calls ``on_train_end``."""
        self.hooks.call("on_train_end", (), dict(self._logs))

    def _end_batches(self) -> None:
        averages = self.position.averages
        self._batches.after(averages.logs if averages else dict, self._epoch)
