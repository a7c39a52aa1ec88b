"""Prints numbers of models of many kinds; ``test_tensor_parallel_scripts`` has them cut."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

keras.config.set_floatx("float64")
keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(45, 12)), rng.normal(size=(45, 1))
fits = {"x": x, "y": y, "batch_size": 8, "epochs": 2, "verbose": 0}
Dense = keras.layers.Dense


def show(name: str, *values: object) -> None:
    flat = [np.asarray(value, "float64").ravel() for value in values]
    print("numbers", name, *np.concatenate(flat), flush=True)


def losses(model: keras.Model, **more: object) -> list[float]:
    return model.fit(**(fits | more)).history["loss"]


def mlp(*units: int) -> keras.Sequential:
    hidden = [Dense(count, "relu") for count in units]
    return keras.Sequential([keras.Input((12,)), *hidden, Dense(1)])


# It is evaluated before it is trained, and trained twice.
plain = mlp(64, 32)
plain.compile(keras.optimizers.AdamW(0.01, global_clipnorm=0.5), "mse")
show("evaluated", plain.evaluate(x, y, verbose=0))
show("plain", losses(plain), losses(plain, epochs=1))

# Keras builds these when it traces the first step.
unbuilt = keras.Sequential([Dense(64, "relu"), Dense(64, "relu"), Dense(1)])
unbuilt.compile("adam", "mse")
show("unbuilt", losses(unbuilt))
unbuilt.summary()


# At the end of such data, Keras makes the writes of a step that need no batch.
def batches():
    for begin in range(0, 24, 8):
        yield x[begin : begin + 8], y[begin : begin + 8]


specs = tuple(tf.TensorSpec((None, n), "float64") for n in (12, 1))
endless = tf.data.Dataset.from_generator(batches, output_signature=specs)
generated = mlp(64)
generated.compile(keras.optimizers.Adam(1e-2), "mse")
show("generated", losses(generated, x=endless, y=None, batch_size=None))


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.up, self.down = Dense(48, "relu"), Dense(24)
        self.norm, self.out = keras.layers.BatchNormalization(), Dense(1)

    def call(self, x, training=False):
        return self.out(self.norm(self.down(self.up(x)), training=training))


own = Own()
own.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
show("own", losses(own, validation_split=0.2), own.predict(x, verbose=0))
own.save_weights("own.weights.h5")


class Gan(keras.Model):
    """It has no ``call``: layouts are those of the models in it."""

    def __init__(self):
        super().__init__()
        self.make = keras.Sequential([keras.Input((4,)), Dense(64, "relu"), Dense(12)])
        self.judge = mlp(64)
        self.seeds = keras.random.SeedGenerator(5)

    def train_step(self, x):
        drawn = keras.random.normal((tf.shape(x)[0], 4), seed=self.seeds)
        with tf.GradientTape() as tape:
            fake = self.judge(self.make(drawn))
            loss = tf.reduce_mean(tf.square(self.judge(x) - 1) + tf.square(fake))
        weights = self.judge.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            made = tf.reduce_mean(tf.square(self.judge(self.make(drawn)) - 1))
        weights = self.make.trainable_weights
        self.other.apply(tape.gradient(made, weights), weights)
        return {"loss": loss, "made": made}


gan = Gan()
gan.compile(keras.optimizers.Adam(1e-3))
gan.other = keras.optimizers.Adam(1e-3)
show("gan", losses(gan, y=None), gan.make.predict(x[:, :4], verbose=0))

# The trunk has been cut by the model that it comes from; its weights are frozen here.
trunk = keras.Model(plain.inputs, plain.layers[1].output)
trunk.trainable = False
tuned = keras.Sequential([keras.Input((12,)), trunk, Dense(40, "relu"), Dense(1)])
tuned.compile("adam", "mse")
show("tuned", losses(tuned))

# Nothing has cut these frozen weights.
words = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(50, 32)])
words.trainable = False
head = keras.Sequential([words, keras.layers.Flatten(), Dense(1)])
head.compile("adam", "mse")
show("frozen", losses(head, x=rng.integers(0, 50, (45, 3))))


class Student(keras.Model):
    """Its loss reads a model that is no layer of it, and stays whole."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **more):
        return tf.reduce_mean(tf.square(y_pred - tf.stop_gradient(teacher(x))))


teacher = mlp(16)
inputs = keras.Input((12,))
student = Student(inputs, Dense(1)(Dense(64, "relu")(inputs)))
student.compile("adam")
show("student", losses(student))

# A training loop of the script's own trains a whole model on each rank.
looped, optimizer = mlp(64), keras.optimizers.Adam(1e-2)


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(looped(x) - y))
    weights = looped.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
    return loss


show("loop", [float(step(x[i : i + 9], y[i : i + 9])) for i in range(0, 45, 9)])
eager = mlp(64)
with tf.GradientTape() as tape:
    loss = tf.reduce_mean(tf.square(eager(x) - y))
show("eager", *tape.gradient(loss, eager.trainable_variables))

# An optimizer that is built before; and values that are assigned before the model is cut.
ready = mlp(64)
ready.set_weights([2 * value for value in ready.get_weights()])
ready.compile(keras.optimizers.Adam(1e-2, use_ema=True), "mse")
ready.optimizer.build(ready.trainable_variables)
show("ready", losses(ready), *ready.get_weights())
for model in (plain, unbuilt, own, gan.judge, tuned, head, student, ready):
    kernels = [v for v in model.weights if len(v.shape) > 1]
    cut = sum(hasattr(v.value, "holder") for v in kernels)
    print("cut", model.name, cut, "of", len(kernels))
