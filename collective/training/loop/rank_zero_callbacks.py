"""The observer of a training that calls the callbacks of rank 0."""

from __future__ import annotations

from typing import Any

import numpy as np

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.loop.batch_methods import BatchMethods
from collective.training.loop.callbacks import CallbackMethods, Callbacks
from collective.training.loop.observer import FinishedStep, Observer
from collective.training.loop.position import Position
from collective.training.process.unit import Unit, at_once


class RankZeroCallbacks(Observer):
    """Runs methods on rank 0, and makes every rank follow what they decided."""

    def __init__(
        self,
        callbacks: Callbacks,
        position: Position,
        params: dict[str, Any],
        unit: Unit = at_once,
    ):
        self.position = position
        self.model = position.model
        self.backend = position.backend
        # Calls them, also those of the validation.
        self.methods = CallbackMethods(
            callbacks, self.model, self.backend, params, unit
        )
        self._batches = BatchMethods(self.methods, "train")
        self._epoch = self._first = self._stop = 0
        self._logs: dict[str, Any] = {}  # of the last epoch
        # Which layers the step trains; until the first step.
        self._trained: list[bool] | None = keras_compat.model.trainable_flags(
            self.model
        )
        self.model.stop_training = False

    def begin(self) -> None:
        """Find out which methods matter, and call ``on_train_begin``.

        There a callback may say with which epoch the training begins
        (``BackupAndRestore``).
        """
        self.methods.agree()
        self.methods.call("on_train_begin", (), {})
        initial = (
            keras_compat.model.initial_epoch(self.model) or self.position.initial_epoch
        )
        agreed = self.position.unit(
            lambda: self.backend.broadcast_array(np.array([float(initial)]))
        )
        self.position.initial_epoch = int(agreed[0])

    def reconfigured(self, root: int) -> None:
        """Act like ``begin``, because another rank may have become rank 0.

        Its callbacks begin with the current epoch.
        """
        self.begin()
        mine = -1 if self.position.reports is None else self._epoch
        epoch = int(
            self.position.unit(lambda: self.backend.broadcast_array(np.array([mine])))[
                0
            ]
        )
        if epoch >= 0:
            self.methods.call("on_epoch_begin", (epoch,), epoch, {})

    def begin_epoch(self, epoch: int, first: int, last: int) -> None:
        """Call ``on_epoch_begin``."""
        self._epoch, self._first, self._stop = epoch, first, last
        self.methods.call("on_epoch_begin", (epoch,), epoch, {})

    def before_input(self, number: int) -> None:
        """Call ``on_train_batch_begin``; refuse what changed the trained layers before."""
        if self._trained is not None:
            if self._trained != keras_compat.model.trainable_flags(self.model):
                raise UsageError(
                    "a callback's on_train_begin, or another method before the first step, has "
                    "changed layer.trainable",
                    hint="set it before collective.fit, and compile the model",
                )
            self._trained = None
        self._batches.before(number - self._first, self._epoch)

    def after_step(self, step: FinishedStep) -> None:
        """Call ``on_train_batch_end``."""
        last = step.number + 1 == self._stop
        if self._batches.ends(step.number - self._first, last):
            self._end_batches()

    def before_validation(self) -> None:
        """Call ``on_train_batch_end`` if the epoch ended unexpectedly."""
        self._end_batches()

    def end_epoch(self, epoch: int, logs: dict[str, float]) -> None:
        """Call ``on_epoch_end``, and take over what callbacks add to the logs."""
        self._end_batches()
        self.methods.call("on_epoch_end", (epoch,), epoch, logs)
        agreed = self.methods.agreed_logs("on_epoch_end", logs)
        if agreed is not logs:
            logs.clear()
            logs.update(agreed)
        self._logs = dict(logs)

    def end(self) -> None:
        """Call ``on_train_end``."""
        self.methods.call("on_train_end", (), dict(self._logs))
        self.methods.share_state()

    def _end_batches(self) -> None:
        reports = self.position.reports

        def logs() -> dict[str, Any]:
            return {} if reports is None else reports.logs()

        self._batches.after(logs, self._epoch)
