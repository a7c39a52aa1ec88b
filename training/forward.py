"""The forward and backward pass of one replica over some rows, as sums.

The functions here are pure: values of variables and rows go in, sums and new state come
out, no variable is written. XLA can compile them, a loop can call them for each
micro-batch, and they run on any replica under any strategy.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from collective.training import keras_compat
from collective.training.input.leaves import count_rows, first_leaf
from collective.training.losses import LossSums, loss_sums
from collective.training.memory.recompute import recompute_blocks
from collective.training.prepared import PreparedModel
from collective.training.step_inputs import Rows, Weights


class Sums(NamedTuple):
    """Sums over rows; they can be added over micro-batches and over replicas.

    Attributes:
        gradients: One list for each denominator of the loss (first the divided part, if
            there is one). Each has one dense tensor for each connected variable.
        weights: Scalars, the denominators of the undivided losses.
        losses: Scalars: the divided part, then the total of each undivided loss.
        outputs: Scalars ``total, weight`` for each output's own loss; weight is 0 for a
            divided one.
        metrics: The metrics' variables, counted from zero.
    """

    gradients: list[list[tf.Tensor]]
    weights: list[tf.Tensor]
    losses: list[tf.Tensor]
    outputs: list[tuple[tf.Tensor, tf.Tensor]]
    metrics: list[tf.Tensor]


def global_loss(sums: Sums) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """The loss, and that of each output, from sums over all replicas."""
    divided, *totals = sums.losses
    loss = divided + sum(
        tf.math.divide_no_nan(t, w) for t, w in zip(totals, sums.weights, strict=True)
    )
    outputs = [
        tf.where(w == 0, t, tf.math.divide_no_nan(t, w)) for t, w in sums.outputs
    ]
    return loss, outputs


class Forward:
    """Forward and backward pass of a compiled model.

    Args:
        prepared: The model.
        seed: Seed of random layers.
        recompute: Whether activations are recomputed instead of kept.

    Attributes:
        connected: Indices of the trainable variables that the loss depends on. This and
            the next two are known once ``train`` has been traced.
        changing: Indices of the non-trainable variables that the model updates.
        has_divided: Whether the divided part of the loss has a gradient.
    """

    def __init__(self, prepared: PreparedModel, seed: int, recompute: bool = False):
        self.model = prepared.model
        self.placement = prepared.placement
        self.seed = seed
        self.recompute = recompute
        self.connected: list[int] = []
        self.changing: list[int] = []
        self.has_divided = True
        self._metric_variables = [
            v for m in keras_compat.metrics(self.model) for v in m.variables
        ]

    def train(
        self,
        weights: Weights,
        rows: Rows,
        global_rows: tf.Tensor,
        loss_scale: tf.Tensor,
        position: tf.Tensor,
    ) -> tuple[Sums, list[tf.Tensor]]:
        """Sums and gradients over the rows of a micro-batch.

        Args:
            weights: Values of the model's variables.
            rows: At least one row.
            global_rows: Rows in the global batch.
            loss_scale: The loss is multiplied by it before differentiation.
            position: ``(step, replica, micro-batch)``, int64: random numbers follow
                from the seed and these.

        Returns:
            The sums, and the new values of the state in ``changing``.
        """
        trainable, state = weights
        key = self._random_key(position)
        state = self._seed_random_layers(state, key)
        fold = tf.random.experimental.stateless_fold_in
        if self.placement is not None:
            trainable = self.placement.colocate(
                trainable, self.model.trainable_variables
            )
        with (
            keras_compat.global_seeds(lambda call: fold(key, -1 - call)),
            tf.GradientTape(persistent=True) as tape,
            self._recomputed(tape),
        ):
            tape.watch(trainable)
            y_pred, new_state, loss = self._call(
                Weights(trainable, state), rows, global_rows, training=True
            )
            scaled = [total * tf.cast(loss_scale, total.dtype) for total in loss.totals]
        gradients = [
            tape.gradient(total, trainable, unconnected_gradients="none")
            for total in scaled
        ]
        del tape
        dense = self._dense(gradients, trainable)
        self.changing = [
            i
            for i, (old, new) in enumerate(zip(state, new_state, strict=True))
            if new is not old and not self._is_seed(i)
        ]
        sums = _sums(loss, dense, self._metrics(rows, y_pred))
        return sums, [new_state[i] for i in self.changing]

    def test(self, weights: Weights, rows: Rows, global_rows: tf.Tensor) -> Sums:
        """Sums over rows in inference mode, without gradients; otherwise as `train`."""
        y_pred, _, loss = self._call(weights, rows, global_rows, training=False)
        return _sums(loss, [], self._metrics(rows, y_pred))

    def _call(
        self, weights: Weights, rows: Rows, global_rows: tf.Tensor, training: bool
    ) -> tuple[Any, list[tf.Tensor], LossSums]:
        """Predictions, new state and loss."""
        model, (x, y, sample_weight) = self.model, rows
        takes_training = keras_compat.takes_training(model)
        placed = (
            contextlib.nullcontext()
            if self.placement is None
            else self.placement.layer_calls(model)
        )
        with placed:
            y_pred, new_state, added = model.stateless_call(
                *weights,
                x,
                return_losses=True,
                **({"training": training} if takes_training else {}),
            )
        count = tf.cast(count_rows(first_leaf(x)), tf.int32)
        mapping = [
            *zip(model.trainable_variables, weights.trainable, strict=True),
            *zip(model.non_trainable_variables, new_state, strict=True),
            # Losses of several outputs have trackers. Reading a tracker's variable is
            # a collective under MultiWorkerMirroredStrategy, and a replica without
            # rows does not run this code.
            *((v, tf.zeros(v.shape, v.dtype)) for v in model.metrics_variables),
        ]
        with keras.StatelessScope(state_mapping=mapping):
            loss = loss_sums(
                model,
                *(x, _or_none(y), y_pred, _or_none(sample_weight)),
                *(added, count, global_rows),
            )
        return y_pred, new_state, loss

    def _dense(
        self, gradients: list[list[Any]], trainable: list[tf.Tensor]
    ) -> list[list[tf.Tensor]]:
        """Dense gradients of connected variables; finds out which these are."""
        self.has_divided = any(g is not None for g in gradients[0])
        if not self.has_divided:
            gradients = gradients[1:]
        self.connected = [
            i for i in range(len(trainable)) if any(g[i] is not None for g in gradients)
        ]
        return [[_dense(g[i], trainable[i]) for i in self.connected] for g in gradients]

    def _metrics(self, rows: Rows, y_pred: Any) -> list[tf.Tensor]:
        zeros = [tf.zeros(v.shape, v.dtype) for v in self._metric_variables]
        x, y, sample_weight = rows
        return keras_compat.metric_sums(
            self.model, zeros, x, _or_none(y), y_pred, _or_none(sample_weight)
        )

    def _recomputed(
        self, tape: tf.GradientTape
    ) -> contextlib.AbstractContextManager[None]:
        if not self.recompute:
            return contextlib.nullcontext()
        return recompute_blocks(self.model, tape)

    def _is_seed(self, index: int) -> bool:
        return keras_compat.is_seed_state(self.model.non_trainable_variables[index])

    def _random_key(self, position: tf.Tensor) -> tf.Tensor:
        """A function of (seed, step, replica, micro-batch) alone."""
        key = tf.constant([self.seed % 2**31, 0], tf.int32)
        for number in tf.unstack(tf.cast(position, tf.int32)):
            key = tf.random.experimental.stateless_fold_in(key, number)
        return key

    def _seed_random_layers(
        self, state: list[tf.Tensor], key: tf.Tensor
    ) -> list[tf.Tensor]:
        """The state, with the key folded into that of every seed generator."""
        fold = tf.random.experimental.stateless_fold_in
        return [
            tf.cast(fold(key, tf.cast(value[0], tf.int32)), value.dtype)
            if self._is_seed(i)
            else value
            for i, value in enumerate(state)
        ]


def _or_none(part: Any) -> Any:
    """None for ``()``, as Keras wants it."""
    return None if isinstance(part, tuple) and not part else part


def _dense(gradient: Any, like: tf.Tensor) -> tf.Tensor:
    """A gradient as a dense tensor: repeated rows of IndexedSlices are summed.

    TensorFlow forgets the shape of some (a Dense layer on sequences), so it is set.
    """
    if gradient is None:
        return tf.zeros_like(like)
    dense = tf.convert_to_tensor(gradient)
    dense.set_shape(like.shape)
    return dense


def _sums(
    loss: LossSums, gradients: list[list[tf.Tensor]], metrics: list[tf.Tensor]
) -> Sums:
    return Sums(
        gradients=gradients,
        weights=[weight for _, weight in loss.undivided],
        losses=loss.totals,
        outputs=[
            (total, tf.zeros_like(total) if weight is None else weight)
            for total, weight in loss.outputs
        ],
        metrics=metrics,
    )
