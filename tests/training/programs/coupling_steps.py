"""Models whose ``train_step`` couples the rows of a batch."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import ops

from tests.training.programs.own_steps import (
    FEATURES,
    LATENT,
    Program,
    mlp,
    program,
    rows,
)
from tests.training.programs.plain_steps import Plain, Regression, regression


@program
def contrastive() -> Program:
    """Return a program whose negatives are the other rows of the batch."""

    class Contrastive(Plain):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                left = self(x, training=True)
                right = self(x + 0.1 * y, training=True)
                logits = ops.matmul(left, ops.transpose(right))
                labels = ops.arange(ops.shape(x)[0])
                loss = ops.mean(
                    keras.losses.sparse_categorical_crossentropy(
                        labels, logits, from_logits=True
                    )
                )
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(grads, self.trainable_variables)
            return {"error": loss}

    model = Contrastive(mlp(FEATURES, LATENT))
    model.compile(keras.optimizers.Adam(0.01))
    x, _, y = rows()
    return model, (x, y)


@program
def returns_a_maximum() -> Program:
    class Largest(Regression):
        def returned(self, loss, y):
            return {"largest": ops.max(y)}

    return regression(Largest)


@program
def metric_of_a_maximum() -> Program:
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.most = self.add_variable((), "zeros", name="most")

        def update_state(self, values, sample_weight=None):
            self.most.assign(ops.maximum(self.most, ops.max(values)))

        def result(self):
            return self.most

    class Model(Regression):
        def __init__(self):
            super().__init__()
            self.largest = Largest()

        def returned(self, loss, y):
            self.largest.update_state(y)
            return {"error": loss}

    return regression(Model)


@program
def local_weights() -> Program:
    """Return a program that computes weights of the optimizer from its rows."""

    class Writing(Regression):
        def returned(self, loss, y):
            self.net.layers[-1].bias.assign(ops.mean(y, axis=0))
            return {"error": loss}

    return regression(Writing)
