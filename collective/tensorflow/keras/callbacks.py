"""Horovod's callbacks for ``model.fit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import collective
from collective.tensorflow.basics import rank, size
from collective.tensorflow.functions import broadcast_variables, tf_variable


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives every rank the root's weights and optimizer state, before the first step.

    Seeds of random layers stay each rank's own.

    Args:
        root_rank: The rank whose variables all ranks get.
        device: The device of the operation; any by default.
        local_variables: Variables that are not broadcast.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Any | None = None
    ):
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local: set[int] = set()
        one = isinstance(local_variables, tf.Variable | keras.Variable)
        for variable in [local_variables] if one else local_variables or ():
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leave a variable out of the broadcast.

        Raises:
            ValueError: If ``var`` is not a variable.
        """
        if not isinstance(tf_variable(var), tf.Variable):
            raise ValueError("All local variables must be of tf.Variable type.")
        self._local.add(id(tf_variable(var)))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast, the first time; build the model first if it is not built.

        Raises:
            ValueError: If there are no variables yet, and no data to build them for.
        """
        if self.broadcast_done:
            return
        if self.model.built:
            self._broadcast()
            return
        # Without an input shape, a model has its variables only when the first step is
        # traced, which then runs at once. So it is built for the shapes of the data
        # when the step is called.
        model = self.model
        step = model.train_function
        if step is None:
            raise ValueError(
                "the model has no variables yet that could be broadcast\n"
                "HINT: call model.build(input_shape) before"
            )

        def build_and_step(iterator: Any) -> Any:
            model.train_function = step
            _build(model, iterator.element_spec)
            self._broadcast()
            return step(iterator)

        model.train_function = build_and_step

    def _broadcast(self) -> None:
        variables, optimizer = list(self.model.weights), self.model.optimizer
        if optimizer is not None:
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            variables += optimizer.variables
        chosen = [v for v in variables if id(tf_variable(v)) not in self._local]
        with tf.device(self.device or None):
            broadcast_variables(chosen, self.root_rank)
        self.broadcast_done = True


def _build(model: keras.Model, batch: Any) -> None:
    """Make the variables of a model for batches of these shapes and dtypes."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    model(
        tf.nest.map_structure(
            lambda spec: keras.KerasTensor(tuple(spec.shape), spec.dtype.name), x
        )
    )


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of an epoch over the ranks, for the callbacks after it.

    Args:
        device: Not used: numbers are averaged in host memory.
    """

    def __init__(self, device: str = ""):
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Put the averages into ``logs``."""
        if not logs:
            return
        names = sorted(logs)
        means = collective.grouped_allreduce(
            [np.asarray(logs[name], np.float64) for name in names],
            name=f"metrics {', '.join(names)}",
        )
        for name, mean in zip(names, means, strict=True):
            logs[name] = mean if mean.ndim else float(mean)


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to ``initial_lr * multiplier`` in some epochs.

    Args:
        initial_lr: The learning rate at the start.
        multiplier: A function of the epoch; or a number, which is raised to the power
            of the epochs since ``start_epoch``.
        start_epoch: The first epoch.
        end_epoch: The epoch at which this ends, exclusive; None for no end.
        staircase: Whether the rate is set once an epoch. If not, it is set for each
            batch, with an epoch that is not a whole number.
        momentum_correction: Whether the velocity of an optimizer with momentum is
            scaled with the learning rate.
        steps_per_epoch: Batches in an epoch; by default the number that ``fit`` knows.

    Raises:
        ValueError: If ``initial_lr`` is missing, or the steps are not known.
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

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Find the number of steps."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__} cannot know the batches of an epoch\n"
                    "HINT: pass steps_per_epoch"
                )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Store the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Set the learning rate, if it is time."""
        ended = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or ended:
            return
        if not self.staircase:
            self._adjust(self.current_epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._adjust(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to the logs of later callbacks."""
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
    """Return the velocities of an optimizer with momentum, which include the rate.

    Horovod scales the momentum for one batch, which moves SGD in the same way; in Keras
    3 the momentum is a constant of the compiled step.
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
        warmup_epochs: The length of the warm-up.
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
            # As if the batch had ended, so that epochs end on round numbers.
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

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to the logs; print the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if epoch == (self.end_epoch or 0) - 1 and self.verbose > 0 and rank() == 0:
            print(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to "
                f"{self._learning_rate():g}."
            )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """``keras.callbacks.ModelCheckpoint`` that keeps the best model only.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: As in Keras.
        filepath: The file. Horovod's estimators set it later, as an attribute.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | None = None,
    ):
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath or f"unset{ending}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = filepath

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin.

        Raises:
            ValueError: If there is no file name yet.
        """
        if not self.filepath:
            raise ValueError(
                "BestModelCheckpoint has no file to write\n"
                "HINT: BestModelCheckpoint(..., filepath='best.keras')"
            )
        super().on_train_begin(logs)
