"""Horovod's callbacks for ``model.fit``."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import collective
from collective.tensorflow.keras.learning_rate import (
    LearningRateScheduleCallback as LearningRateScheduleCallback,
)
from collective.tensorflow.keras.learning_rate import (
    LearningRateWarmupCallback as LearningRateWarmupCallback,
)
from collective.tensorflow.variables import broadcast_variables, tf_variable


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives every rank the root's weights and optimizer state, before the first step.

    Seeds of random layers stay each rank's own.

    Args:
        root_rank: Whose variables all ranks get.
        device: Where it happens; any by default.
        local_variables: What is left as it is.
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
        """Leaves a variable as it is.

        Raises:
            ValueError: If it is no variable.
        """
        if not isinstance(tf_variable(var), tf.Variable):
            raise ValueError("All local variables must be of tf.Variable type.")
        self._local.add(id(tf_variable(var)))

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Broadcasts, the first time; the model is built before, if it is not.

        Raises:
            ValueError: If there are no variables yet, nor data to build them for.
        """
        if self.broadcast_done:
            return
        if self.model.built:
            self._broadcast()
            return
        # Without a shape of its input, a model has its variables when the first step
        # is traced, which then runs at once. So it is built for the shapes of the data
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
    """Makes the variables of a model for batches of these shapes and dtypes."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    model(
        tf.nest.map_structure(
            lambda spec: keras.KerasTensor(tuple(spec.shape), spec.dtype.name), x
        )
    )


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of an epoch over the ranks, for the callbacks behind it.

    Args:
        device: Nothing: numbers are averaged in host memory.
    """

    def __init__(self, device: str = ""):
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Puts the averages into ``logs``."""
        if not logs:
            return
        names = sorted(logs)
        means = collective.grouped_allreduce(
            [np.asarray(logs[name], np.float64) for name in names],
            name=f"metrics {', '.join(names)}",
        )
        for name, mean in zip(names, means, strict=True):
            logs[name] = mean if mean.ndim else float(mean)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """``keras.callbacks.ModelCheckpoint`` that keeps the best model only.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: As there.
        filepath: Where to. Horovod's estimators set it later, as an attribute.
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

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Begins.

        Raises:
            ValueError: If there is no file name by now.
        """
        if not self.filepath:
            raise ValueError(
                "BestModelCheckpoint has no file to write\n"
                "HINT: BestModelCheckpoint(..., filepath='best.keras')"
            )
        super().on_train_begin(logs)
