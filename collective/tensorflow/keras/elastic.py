"""The elastic state of a Keras model, and callbacks that keep it up to date."""

from __future__ import annotations

from typing import Any

import keras

from collective.tensorflow.elastic import TensorFlowKerasState
from collective.tensorflow.elastic import run as run


class KerasState(TensorFlowKerasState):
    """A Keras model with its optimizer, and Python objects.

    Args:
        model: A built model.
        optimizer: By default the one that the model was compiled with.
        **kwargs: Attributes and their values, as ``batch=0, epoch=0``.
    """


class _StateCallback(keras.callbacks.Callback):
    def __init__(self, state: Any):
        super().__init__()
        self.state = state


class CommitStateCallback(_StateCallback):
    """Commits a state after some batches, and after each epoch.

    Args:
        state: The state to commit.
        batches_per_commit: Batches between two commits.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1):
        super().__init__(state)
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Count from zero, as every rank does."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Commit, if it is time."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit."""
        self.state.commit()


class UpdateBatchStateCallback(_StateCallback):
    """Sets ``state.batch`` to the number of the batch; 0 after each epoch.

    Horovod also shortens the first epoch after a restart, through a number that Keras 3
    does not read. Say it yourself: ``fit(steps_per_epoch=steps - state.batch)``.

    Args:
        state: The state to update.
    """

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Set the number of the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the number of the batch to 0."""
        self.state.batch = 0


class UpdateEpochStateCallback(_StateCallback):
    """Sets ``state.epoch`` to the number of epochs that are over, over restarts too.

    Args:
        state: The state to update.
    """

    def __init__(self, state: Any):
        super().__init__(state)
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Copy epoch and batch from the state."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the number of epochs."""
        self.state.epoch = self.initial_epoch + epoch + 1
