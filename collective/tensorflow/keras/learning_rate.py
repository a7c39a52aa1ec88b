"""Callbacks that set the learning rate while ``model.fit`` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from collective.tensorflow.basics import rank, size


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to ``initial_lr * multiplier`` in some epochs.

    Args:
        initial_lr: The learning rate at the start.
        multiplier: A function of the epoch; or a number, which is taken to the power of
            the epochs since ``start_epoch``.
        start_epoch: The first epoch.
        end_epoch: The first epoch no more; None for no end.
        staircase: Whether it is set once an epoch. Else for each batch, with an epoch
            that is no whole number.
        momentum_correction: Whether an optimizer with momentum has its velocity scaled
            with the learning rate.
        steps_per_epoch: Batches in an epoch; what ``fit`` knows by default.

    Raises:
        ValueError: Without ``initial_lr``, or if the steps are not known.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            self.multiplier = lambda epoch: multiplier ** (epoch - start_epoch)

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Finds the number of steps."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__} cannot know the batches of an epoch\n"
                    "HINT: pass steps_per_epoch"
                )

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Remembers the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Sets the learning rate, if it is time."""
        ended = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or ended:
            return
        if not self.staircase:
            self._adjust(self.current_epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._adjust(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Adds the learning rate to the logs of later callbacks."""
        if logs is not None:
            logs["lr"] = self._learning_rate()

    def _learning_rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _adjust(self, epoch: float) -> None:
        before, after = self._learning_rate(), self.initial_lr * self.multiplier(epoch)
        self.model.optimizer.learning_rate = after
        if self.momentum_correction and before > 0 and after != before:
            for velocity in _velocities(self.model.optimizer):
                velocity.assign(velocity * (after / before))


def _velocities(optimizer: Any) -> list[Any]:
    """What an optimizer with momentum moves by; the learning rate is in it.

    Horovod scales the momentum for one batch, which moves SGD the same way; in Keras 3
    it is a constant of the compiled step.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    momentum = getattr(optimizer, "momentum", None)
    if not optimizer.built or not isinstance(momentum, int | float) or momentum <= 0:
        return []
    found = getattr(optimizer, "momentums", None)
    return list(found or getattr(optimizer, "_momentums", None) or [])


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size()`` to ``initial_lr``.

    After Goyal et al., "Accurate, Large Minibatch SGD" (2017).

    Args:
        initial_lr: The learning rate after the warm-up.
        warmup_epochs: How long it takes.
        momentum_correction, steps_per_epoch: As for ``LearningRateScheduleCallback``.
        verbose: 1 to print the end of the warm-up on rank 0.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        def multiplier(epoch: float) -> float:
            # As if the batch was over: so epochs end on round numbers.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return 1.0 / size() * (epoch * (size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Adds the learning rate to the logs; prints the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if epoch == (self.end_epoch or 0) - 1 and self.verbose > 0 and rank() == 0:
            print(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to "
                f"{self._learning_rate():g}."
            )
