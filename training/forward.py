"""What one replica makes of some rows: sums, and nothing else.

The function here is pure: values of variables and a batch go in, sums and new state
come out, no variable is written. That makes it safe to compile with XLA, to call in a
loop over micro-batches, and to run on any replica under any strategy.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from collective.training import keras_compat
from collective.training.losses import LossSums, loss_sums
from collective.training.memory.recompute import recomputed
from collective.training.parallel import placement


class Sums(NamedTuple):
    """Sums over rows. All add up over micro-batches and over replicas.

    Attributes:
        gradients: One list for each denominator of the loss (the planned part first,
            if there is one), in it one dense tensor for each connected variable.
        weights: The denominators of the later lists, scalars.
        losses: Scalars: planned part, then each weighed sum.
        outputs: Scalars ``sum, weight`` for each output's own loss.
        metrics: The metrics' variables, counted from zero.
    """

    gradients: list[list[tf.Tensor]]
    weights: list[tf.Tensor]
    losses: list[tf.Tensor]
    outputs: list[tuple[tf.Tensor, tf.Tensor]]
    metrics: list[tf.Tensor]


class Forward:
    """Forward and backward pass of a compiled model, as a pure function.

    Attributes:
        connected: Indices of the trainable variables the loss depends on; known
            once the function has been traced.
        changing: Indices of the non-trainable variables the model updates; likewise.
        has_planned: Whether any part of the loss has a planned weight; likewise.
    """

    def __init__(self, model: keras.Model, seed: int, recompute: bool = False):
        self.model = model
        self.seed = seed
        self.recompute = recompute
        self.placement = placement.of(model)
        self.connected: list[int] = []
        self.changing: list[int] = []
        self.has_planned = True
        self.metric_variables = [
            v for m in keras_compat.metrics(model) for v in m.variables
        ]

    def train(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        x: Any,
        y: Any,
        sample_weight: Any,
        global_rows: tf.Tensor,
        scale: tf.Tensor,
        draw: tf.Tensor,
    ) -> tuple[Sums, list[tf.Tensor]]:
        """Sums and gradients over the rows of a micro-batch.

        Args:
            trainable: Values of ``model.trainable_variables``.
            state: Values of ``model.non_trainable_variables``.
            x, y, sample_weight: The rows, at least one; ``()`` for what is not there.
            global_rows: Rows in the global batch.
            scale: What the loss is multiplied with before differentiation.
            draw: ``(step, replica, micro-batch)``, int64: what random layers draw
                from.

        Returns:
            The sums, and the new values of the state in ``changing``.
        """
        y, sample_weight = _or_none(y), _or_none(sample_weight)
        key = self._key(draw)
        state = self._with_seeds(state, key)
        fold = tf.random.experimental.stateless_fold_in
        if self.placement is not None:
            trainable = self.placement.beside(trainable, self.model.trainable_variables)
        with (
            keras_compat.global_seeds(lambda call: fold(key, -1 - call)),
            tf.GradientTape(persistent=True) as tape,
            self._blocks(tape),
        ):
            tape.watch(trainable)
            y_pred, new_state, loss = self._call(
                trainable, state, x, y, sample_weight, global_rows, training=True
            )
            parts = [loss.planned, *(total for total, _ in loss.weighed)]
            scaled = [part * tf.cast(scale, part.dtype) for part in parts]
        gradients = [
            tape.gradient(part, trainable, unconnected_gradients="none")
            for part in scaled
        ]
        del tape
        self.has_planned = any(g is not None for g in gradients[0])
        if not self.has_planned:
            gradients = gradients[1:]
        self.connected = [
            i for i in range(len(trainable)) if any(g[i] is not None for g in gradients)
        ]
        dense = [
            [_dense(g[i], trainable[i]) for i in self.connected] for g in gradients
        ]
        self.changing = [
            i
            for i, (old, new) in enumerate(zip(state, new_state, strict=True))
            if new is not old and not self._is_seed(i)
        ]
        metrics = self._metrics(x, y, y_pred, sample_weight)
        return _sums(loss, dense, metrics), [new_state[i] for i in self.changing]

    def test(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        x: Any,
        y: Any,
        sample_weight: Any,
        global_rows: tf.Tensor,
    ) -> Sums:
        """Sums over rows in inference mode; no gradients. Arguments as in `train`."""
        y, sample_weight = _or_none(y), _or_none(sample_weight)
        y_pred, _, loss = self._call(
            trainable, state, x, y, sample_weight, global_rows, training=False
        )
        return _sums(loss, [], self._metrics(x, y, y_pred, sample_weight))

    def _metrics(self, *batch: Any) -> list[tf.Tensor]:
        zeros = [tf.zeros(v.shape, v.dtype) for v in self.metric_variables]
        return keras_compat.metric_sums(self.model, zeros, *batch)

    def _call(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        x: Any,
        y: Any,
        sample_weight: Any,
        global_rows: tf.Tensor,
        training: bool,
    ) -> tuple[Any, list[tf.Tensor], LossSums]:
        model = self.model
        takes_training = keras_compat.takes_training(model)
        placed = self.placement.calls() if self.placement else contextlib.nullcontext()
        with placed:
            y_pred, new_state, added = model.stateless_call(
                trainable,
                state,
                x,
                return_losses=True,
                **({"training": training} if takes_training else {}),
            )
        rows = tf.shape(tf.nest.flatten(x)[0])[0]
        mapping = [
            *zip(model.trainable_variables, trainable, strict=True),
            *zip(model.non_trainable_variables, new_state, strict=True),
            # Losses of several outputs have trackers; to read one is a collective
            # under MultiWorkerMirroredStrategy, and replicas come by here unequally
            # often.
            *((v, tf.zeros(v.shape, v.dtype)) for v in model.metrics_variables),
        ]
        with keras.StatelessScope(state_mapping=mapping):
            loss = loss_sums(
                model, x, y, y_pred, sample_weight, added, rows, global_rows
            )
        return y_pred, new_state, loss

    def _blocks(self, tape: tf.GradientTape) -> contextlib.AbstractContextManager[None]:
        if not self.recompute:
            return contextlib.nullcontext()
        return recomputed(self.model, tape)

    def _is_seed(self, index: int) -> bool:
        return keras_compat.is_seed_state(self.model.non_trainable_variables[index])

    def _key(self, draw: tf.Tensor) -> tf.Tensor:
        """What random layers draw from: (seed, step, replica, micro-batch) alone."""
        key = tf.constant([self.seed % 2**31, 0], tf.int32)
        for number in tf.unstack(tf.cast(draw, tf.int32)):
            key = tf.random.experimental.stateless_fold_in(key, number)
        return key

    def _with_seeds(self, state: list[tf.Tensor], key: tf.Tensor) -> list[tf.Tensor]:
        """Gives every seed generator of the model a state that follows from the key."""
        fold = tf.random.experimental.stateless_fold_in
        return [
            tf.cast(fold(key, tf.cast(value[0], tf.int32)), value.dtype)
            if self._is_seed(i)
            else value
            for i, value in enumerate(state)
        ]


def _or_none(part: Any) -> Any:
    """None for ``()``: functions with a signature cannot be given None."""
    return None if isinstance(part, tuple) and not part else part


def _dense(gradient: Any, like: tf.Tensor) -> tf.Tensor:
    """A gradient as a dense tensor: repeated rows of IndexedSlices are added up.

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
        weights=[weight for _, weight in loss.weighed],
        losses=[loss.planned, *(total for total, _ in loss.weighed)],
        outputs=[
            (total, tf.zeros_like(total) if weight is None else weight)
            for total, weight in loss.outputs
        ],
        metrics=metrics,
    )
