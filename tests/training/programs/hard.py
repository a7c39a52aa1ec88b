"""Ordinary Keras programs in which something is not a plain sum over rows.

Each must train the model of stock Keras, with any pieces of a batch. All are tiny, because a
program costs its tracing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from tests.training.programs.program import (
    CLASSES,
    FEATURES,
    LENGTH,
    WORDS,
    Program,
    weighted,
    words,
)


def dense(*more: Any, **compiled: Any) -> Callable[[], keras.Model]:
    """Return a maker of a small network; ``more`` make layers before its last."""

    def make() -> keras.Model:
        layers = [
            keras.Input((FEATURES,)),
            keras.layers.Dense(6, activation="tanh"),
            *(layer() for layer in more),
            keras.layers.Dense(CLASSES),
        ]
        model = keras.Sequential(layers)
        settings = {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse"}
        made = {k: v() if isinstance(v, type) else v for k, v in compiled.items()}
        model.compile(**(settings | made))
        return model

    return make


def language(loss: Any) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        layers = [
            keras.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(WORDS, 4),
            keras.layers.Dense(WORDS),
        ]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    return make


def subclassed(kind: type[keras.Model], **compiled: Any) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        model = kind()
        settings = {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse"}
        model.compile(**(settings | compiled))
        return model

    return make


# --- losses -----------------------------------------------------------------------


def loss_in_function(y: Any, p: Any) -> Any:
    return keras.losses.MeanSquaredError()(y, p)


def loss_added_to_rows(y: Any, p: Any) -> Any:
    rows = ops.mean(ops.square(y - p), axis=-1)
    return rows + 0.5 * keras.losses.MeanAbsoluteError()(y, p)


class LossInLoss(keras.losses.Loss):
    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.losses.MeanSquaredError()
        self.rows = keras.losses.Huber(reduction="none")

    def call(self, y: Any, p: Any) -> Any:
        return self.rows(y, p) + 0.3 * self.inner(y, p)


class OwnCall(keras.losses.Loss):
    def __call__(self, y: Any, p: Any, sample_weight: Any = None) -> Any:
        return 0.7 * super().__call__(y, p, sample_weight)

    def call(self, y: Any, p: Any) -> Any:
        return ops.mean(ops.square(y - p), axis=-1)


class RowsByOwnCall(OwnCall):
    """Returns a value for each row: Keras differentiates their sum and shows their mean."""

    def __call__(self, y: Any, p: Any, sample_weight: Any = None) -> Any:
        return self.call(y, p)


def scalar(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(y - p))


def by_class(y: Any, p: Any) -> Any:
    """Return one value for each class, for any number of rows."""
    return ops.mean(ops.square(y - p), axis=0)


def flattened(y: Any, p: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(
        ops.reshape(y, [-1]), ops.reshape(p, [-1, WORDS]), from_logits=True
    )


def flattened_with_time_last(y: Any, p: Any) -> Any:
    each = keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)
    return ops.transpose(each)


def without_padding(y: Any, p: Any) -> Any:
    """Return as many values as there are words, which depends on the data."""
    each = keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)
    return tf.boolean_mask(each, ops.cast(y, "int32") != 0)


LOSSES = {
    "loss in a function": Program(dense(loss=loss_in_function)),
    "loss added to rows": Program(dense(loss=loss_added_to_rows)),
    "loss in a loss": Program(dense(loss=LossInLoss)),
    "own __call__": Program(dense(loss=OwnCall)),
    "own __call__ with rows": Program(
        dense(loss=RowsByOwnCall, optimizer=keras.optimizers.SGD)
    ),
    "scalar": Program(dense(loss=scalar)),
    "a value a class": Program(dense(loss=by_class)),
    "flattened": Program(language(flattened), words),
    "time last": Program(language(flattened_with_time_last), words),
    "without padding": Program(language(without_padding), words),
    "no reduction": Program(
        lambda: dense(loss=keras.losses.MeanSquaredError(reduction=None))()
    ),
    "no reduction, weighted": Program(
        lambda: dense(loss=keras.losses.MeanSquaredError(reduction="none"))(), weighted
    ),
    "summed": Program(
        lambda: dense(
            loss=keras.losses.MeanSquaredError(reduction="sum"),
            optimizer=keras.optimizers.SGD(0.01),
        )(),
        weighted,
    ),
}


class WithoutTraining(keras.Model):
    """Has a ``compute_loss`` as before Keras 3.3."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(CLASSES)

    def call(self, x: Any) -> Any:
        return self.out(x)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
    ) -> Any:
        return ops.mean(ops.abs(y - y_pred))


class WithTraining(WithoutTraining):
    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return ops.mean(ops.abs(y - y_pred)) * (1.0 if training else 100.0)


class RowsOfLoss(WithoutTraining):
    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
    ) -> Any:
        return ops.mean(ops.abs(y - y_pred), axis=-1)


LOSSES |= {
    "compute_loss without training": Program(subclassed(WithoutTraining)),
    "compute_loss with training": Program(subclassed(WithTraining)),
    "compute_loss of rows": Program(subclassed(RowsOfLoss)),
}

# --- metrics ----------------------------------------------------------------------


class Hits(keras.metrics.Metric):
    """Returns its variable itself as its result."""

    def __init__(self) -> None:
        super().__init__(name="hits")
        self.hits = self.add_variable((), "zeros", name="hits")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        right = ops.argmax(y, -1) == ops.argmax(p, -1)
        self.hits.assign_add(ops.sum(ops.cast(right, self.hits.dtype)))

    def result(self) -> Any:
        return self.hits


class Several(Hits):
    def result(self) -> Any:
        return {"hits": self.hits, "twice": 2 * self.hits}


class Watches(keras.Model):
    """Updates means in ``call`` and in ``compute_loss``, of scalars and of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(6, activation="tanh")
        self.out = keras.layers.Dense(CLASSES)
        self.size = keras.metrics.Mean(name="size")
        self.sizes = keras.metrics.Mean(name="sizes")
        self.error = keras.metrics.Mean(name="error")

    def call(self, x: Any) -> Any:
        hidden = self.hidden(x)
        self.size.update_state(ops.mean(hidden**2))
        self.sizes.update_state(ops.mean(hidden**2, axis=-1))
        return self.out(hidden)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
    ) -> Any:
        loss = ops.mean(ops.square(y - y_pred))
        self.error.update_state(loss)
        return loss


class OwnMetrics(WithoutTraining):
    """Has only its own loss tracker, as in the example of Keras' documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = keras.metrics.Mean(name="loss")

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
    ) -> Any:
        loss = ops.mean(ops.square(y - y_pred))
        self.tracker.update_state(loss)
        return loss

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]


METRICS = {
    # If Keras validates, it shows the validation's value as the training's.
    "result is the variable": Program(
        lambda: dense(metrics=[Hits()])(), validates=False
    ),
    "results are variables": Program(
        lambda: dense(metrics=[Several()])(), validates=False
    ),
    "scalar metric": Program(lambda: dense(metrics=[scalar, "mae"])()),
    "metrics of the model": Program(subclassed(Watches)),
    "metrics replaced": Program(subclassed(OwnMetrics)),
}

# --- state ------------------------------------------------------------------------


class Bounded(keras.layers.Layer):
    """Assigns its kernel in the forward pass."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight((shape[-1], shape[-1]), "glorot_uniform")

    def call(self, x: Any, training: bool = False) -> Any:
        before = x @ self.kernel
        if training:
            self.kernel.assign(ops.clip(self.kernel, -0.5, 0.5) * 0.9)
        return before + x @ self.kernel


class Counts(keras.layers.Layer):
    """Has state of several dtypes that all rows change in the same way."""

    def build(self, shape: Any) -> None:
        def state(start: Any, dtype: str) -> Any:
            return self.add_weight(
                (), keras.initializers.Constant(start), dtype=dtype, trainable=False
            )

        self.steps = state(2**24, "int64")
        self.far = state(2**40, "int64")
        self.small = state(3, "int32")
        self.seen = state(False, "bool")
        self.most = state(-np.inf, keras.config.floatx())
        self.kernel = self.add_weight((shape[-1],), "ones")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign(self.steps + 1)
            self.far.assign(self.far + 2**33 + 1)
            self.small.assign(self.small - 2)
            self.seen.assign(ops.logical_not(self.seen))
            self.most.assign(ops.maximum(self.most, ops.max(self.kernel)))
        return x * self.kernel


class ReadsBack(keras.layers.Layer):
    """Divides by a state that it has just assigned; no gradient flows through that."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight((shape[-1],), "glorot_normal")
        self.scale = self.add_weight((), "ones", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.scale.assign(1 + ops.mean(ops.square(self.kernel)))
        return x * self.kernel / self.scale


class FollowsTraining(keras.layers.Layer):
    def call(self, x: Any, training: bool = False) -> Any:
        return 2 * x if training else x


class ContextOfTraining(WithoutTraining):
    """Does not pass ``training`` on: Keras does, by the context of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = FollowsTraining()

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.inner(x))


def of_float8() -> keras.Model:
    """Return a model whose new scales are maxima of its inputs: gradients that are values."""
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(8), keras.layers.Dense(CLASSES)]
    )
    model.quantize("float8")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def spectral() -> keras.layers.Layer:
    return keras.layers.SpectralNormalization(keras.layers.Dense(6))


def accumulating() -> keras.Model:
    model = dense()()
    model.optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)
    return model


STATE = {
    "spectral normalization": Program(dense(spectral)),
    "the optimizer accumulates": Program(accumulating),
    "assigns its kernel": Program(dense(Bounded)),
    "counts": Program(dense(Counts)),
    "counts and reads back": Program(dense(ReadsBack)),
    "counts in float32": Program(dense(Counts), floatx="float32", tolerance=1e-5),
    "context of training": Program(subclassed(ContextOfTraining)),
    # A difference in the last bit becomes one of an eighth after rounding to float8.
    "float8": Program(of_float8, floatx="float32", tolerance=0.02),
}

# --- callbacks --------------------------------------------------------------------


def annealed() -> keras.Model:
    """Return a model whose loss has a weight that is not a variable of the model."""
    weight = keras.Variable(1.0, dtype=keras.config.floatx())
    model = dense(loss=lambda y, p: weight * ops.mean(ops.square(y - p), axis=-1))()
    model.get_weight = lambda: weight
    return model


def with_rate() -> keras.Model:
    rate = tf.Variable(0.1, dtype=keras.config.floatx())
    model = dense(optimizer=keras.optimizers.SGD(lambda: rate))()
    model.get_weight = lambda: rate
    return model


def halving(hook: str) -> Callable[[keras.Model], list[Any]]:
    def make(model: keras.Model) -> list[Any]:
        def halve(*_: Any, **__: Any) -> None:
            model.get_weight().assign(model.get_weight() / 2)

        return [keras.callbacks.LambdaCallback(**{hook: halve})]

    return make


def freezing(model: keras.Model) -> list[Any]:
    """Freeze a layer after the first epoch, which Keras' train function ignores."""

    def freeze(*_: Any) -> None:
        model.layers[0].trainable = False

    return [keras.callbacks.LambdaCallback(on_epoch_end=freeze)]


CALLBACKS = {
    "annealed by epoch": Program(annealed, callbacks=halving("on_epoch_begin")),
    "annealed by batch": Program(annealed, callbacks=halving("on_train_batch_begin")),
    "own rate": Program(with_rate, callbacks=halving("on_epoch_end")),
    "frozen late": Program(dense(), callbacks=freezing),
}

PROGRAMS = LOSSES | METRICS | STATE | CALLBACKS
