"""The elastic state of a Keras model, and callbacks that keep it up to date."""

from __future__ import annotations

from typing import Any

import keras

from collective.tensorflow.elastic import TensorFlowKerasState
from collective.tensorflow.elastic import run as run


class KerasState(TensorFlowKerasState):
    """A Keras model with its optimizer, and Python objects.

    Args:
        model: Built.
        optimizer: The compiled one by default.
        **kwargs: Attributes and their values, as ``batch=0, epoch=0``.
    """


class _StateCallback(keras.callbacks.Callback):
    def __init__(self, state: Any):
        super().__init__()
        self.state = state


class CommitStateCallback(_StateCallback):
    """Commits a state after some batches, and after each epoch.

    Args:
        state: What is committed.
        batches_per_commit: Batches between two commits.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1):
        super().__init__(state)
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Counts from zero, as on every rank."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Commits, if it is time."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits."""
        self.state.commit()


class UpdateBatchStateCallback(_StateCallback):
    """Sets ``state.batch`` to the number of the batch; 0 after each epoch.

    Horovod also shortens the first epoch after a restart, through a number that Keras 3
    does not read. Say it yourself: ``fit(steps_per_epoch=steps - state.batch)``.

    Args:
        state: What is updated.
    """

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Sets the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets it to 0."""
        self.state.batch = 0


class UpdateEpochStateCallback(_StateCallback):
    """Sets ``state.epoch`` to the number of epochs that are over, over restarts too.

    Args:
        state: What is updated.
    """

    def __init__(self, state: Any):
        super().__init__(state)
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Takes what the state has."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the epoch."""
        self.state.epoch = self.initial_epoch + epoch + 1
