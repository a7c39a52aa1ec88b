"""Programs of the kinds that a loop which imitates Keras trains otherwise; each is ordinary.

``python kinds_of_programs.py`` trains all of them; ``collectiverun --keras`` does so on
ranks. Prints one line ``NAME numbers`` for each, or the error it ends by.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
PROGRAMS: dict[str, Callable[[], Any]] = {}
RNG = np.random.RandomState(0)
X, Y = RNG.randn(50, 6), RNG.randn(50, 2)


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[function.__name__] = function
    return function


def net(outputs: int = 2) -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(outputs)]
    )


def compiled(model: keras.Model, **more: Any) -> keras.Model:
    model.compile(keras.optimizers.Adam(0.02), "mse", **more)
    return model


class Own(keras.Model):
    """A model whose step minimises ``loss_of(data)``."""

    def __init__(self, outputs: int = 2):
        super().__init__()
        self.net = net(outputs)

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        weights = self.net.trainable_variables
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )
        return {"loss": loss}


def trained(model: keras.Model, data: Any, **more: Any) -> Any:
    if not model.compiled:
        model.compile(keras.optimizers.Adam(0.02))
    history = model.fit(data, epochs=2, verbose=0, **more)
    return history.history, [w.sum() for w in model.get_weights()]


@program
def unlike_rows():
    """Three unlabelled rows for each labelled one, as in FixMatch; the rows part later."""

    class Fix(Own):
        def loss_of(self, data):
            (x, y), others = data
            fit = tf.reduce_mean((self.net(x) - y) ** 2)
            return fit + tf.reduce_mean(self.net(others)) ** 2

    def batches():
        for rows, more in ((8, 24), (8, 8), (5, 20), (8, 3)):
            yield (X[:rows], Y[:rows]), X[-more:]

    spec = ((tf.TensorSpec((None, 6), "float64"), tf.TensorSpec((None, 2), "float64")),)
    spec = (*spec, tf.TensorSpec((None, 6), "float64"))
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    return trained(Fix(), data)


@program
def graph_of_nodes_and_edges():
    class Graph(Own):
        def loss_of(self, data):
            (nodes, edges), labels = data
            hidden = self.net(nodes)
            sums = tf.math.unsorted_segment_sum(
                tf.gather(hidden, edges[:, 0]), edges[:, 1], tf.shape(nodes)[0]
            )
            return tf.reduce_mean((tf.reduce_mean(sums, 0) - labels) ** 2)

    def graphs():
        for i in range(5):
            n = 4 + i
            yield (X[:n], RNG.randint(0, n, (2 * n, 2))), Y[i]

    RNG.seed(4)
    spec = (
        (tf.TensorSpec((None, 6), "float64"), tf.TensorSpec((None, 2), "int64")),
        tf.TensorSpec((2,), "float64"),
    )
    listed = list(graphs())
    data = tf.data.Dataset.from_generator(lambda: iter(listed), output_signature=spec)
    return trained(Graph(), data)


@program
def batches_without_rows():
    def batches():
        for rows in (8, 0, 3, 0, 1):
            yield X[:rows], Y[:rows]

    spec = (tf.TensorSpec((None, 6), "float64"), tf.TensorSpec((None, 2), "float64"))
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)

    class Sum(Own):
        def loss_of(self, data):
            return tf.reduce_sum((self.net(data[0]) - data[1]) ** 2) + 0.1

    return trained(Sum(), data)


@program
def predict_step_of_its_own():
    class Raw(keras.Model):
        def predict_step(self, data):
            return {"twice": 2.0 * data["a"], "sum": data["a"] + data["b"]}

    found = Raw().predict({"a": X, "b": 2 * X}, batch_size=16, verbose=0)
    return {name: value.sum(0) for name, value in found.items()}


@program
def hooks_by_keyword():
    seen: list[Any] = []

    class Hooks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, *, logs=None):
            seen.append([batch, *sorted(logs)])

        def on_test_batch_end(self, batch, *, logs=None):
            seen.append([batch, *sorted(logs)])

    model = compiled(net(), metrics=["mae"])
    model.fit(X, Y, verbose=0, callbacks=[Hooks()], validation_split=0.3)
    return seen


@program
def pipeline_reads_a_variable_of_a_callback():
    scale = tf.Variable(1.0, dtype="float64", trainable=False)

    class Sets(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            scale.assign(2.0 + epoch)

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    data = data.map(lambda x, y: (x * scale, y))
    return trained(compiled(net()), data, callbacks=[Sets()])


@program
def eager_step_reads_what_a_callback_sets():
    class Eager(Own):
        epoch = 0

        def loss_of(self, data):
            return tf.reduce_mean((self.net(data[0]) - data[1]) ** 2) * (1 + self.epoch)

    class Sets(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.epoch = epoch + 1

    model = Eager()
    model.compile(keras.optimizers.Adam(0.02), run_eagerly=True)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    return trained(model, data, callbacks=[Sets()])


@program
def callback_assigns_in_evaluate():
    class Assigns(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            for weight in self.model.weights:
                weight.assign(weight * 0.5)

    model = compiled(net())
    return model.evaluate(X, Y, batch_size=16, verbose=0, callbacks=[Assigns()])


@program
def built_in_the_first_step():
    model = keras.Sequential([layers.Dense(8), layers.Dropout(0.5, seed=1)])
    model.add(layers.Dense(2))
    compiled(model)
    history = model.fit(X, Y, epochs=2, batch_size=16, shuffle=False, verbose=0)
    return history.history


@program
def step_reads_the_state_of_its_optimizer():
    class Reads(Own):
        def loss_of(self, data):
            loss = tf.reduce_mean((self.net(data[0]) - data[1]) ** 2)
            done = tf.cast(self.optimizer.iterations, "float64")
            return loss / (1.0 + done)

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    return trained(Reads(), data)


@program
def order_of_a_py_dataset():
    class Shuffles(keras.utils.PyDataset):
        def __init__(self):
            super().__init__()
            self.order = np.arange(50)

        def __len__(self):
            return 4

        def __getitem__(self, i):
            rows = self.order[12 * i : 12 * i + 12]
            return X[rows], Y[rows] + 0.01 * np.random.randn(len(rows), 2)

        def on_epoch_end(self):
            np.random.shuffle(self.order)

    np.random.seed(3)
    return trained(compiled(net()), Shuffles(), validation_data=Shuffles())


@program
def several_steps_an_execution():
    model = compiled(net(), steps_per_execution=3)
    seen: list[int] = []
    hook = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(batch)
    )
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[hook])
    return seen, model.predict(X, batch_size=8, verbose=0).sum(0)


@program
def decisions_by_chance():
    """Each rank draws by itself; rank 0's decisions count."""

    class Chance(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            own = os.getpid() % 97  # not the same on two ranks
            self.model.optimizer.learning_rate = 1e-9 * own
            self.model.stop_training = bool(batch + own % 2 > 2)

    model = compiled(net())
    model.fit(
        X, Y, batch_size=5, epochs=3, shuffle=False, verbose=0, callbacks=[Chance()]
    )
    return model.evaluate(X, Y, verbose=0) > 0


@program
def unseeded_generators():
    """Data by generators without a seed; what they draw differs in each run."""
    draws = (np.random.RandomState().rand(), np.random.default_rng().random())
    draws += (random.Random().random(), np.random.Generator(np.random.PCG64()).random())
    x = X * (1.0 + np.prod(draws))
    folder = tempfile.mkdtemp()

    class Writes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with open(os.path.join(folder, f"{epoch}.txt"), "w") as file:
                file.write(str(epoch))
            self.model.save_weights(os.path.join(folder, "last.weights.h5"))

    model = compiled(net())
    model.fit(x, Y, epochs=2, verbose=0, callbacks=[Writes()])
    model.load_weights(os.path.join(folder, "last.weights.h5"))
    return sorted(os.listdir(folder))


@program
def train_on_batch_of_two_models():
    first, second = compiled(net()), compiled(net())
    losses = []
    for i in range(4):
        x, y = X[i * 9 : i * 9 + 9], Y[i * 9 : i * 9 + 9]
        losses.append(first.train_on_batch(x, y))
        losses.append(second.train_on_batch(x, first.predict_on_batch(x)))
        losses.append(second.test_on_batch(x, y))
    return np.array(losses, "float64")


@program
def a_log_of_a_callback():
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log.csv")
        model = compiled(net())
        logger = keras.callbacks.CSVLogger(log, append=True)
        model.fit(X, Y, epochs=2, shuffle=False, verbose=0, callbacks=[logger])
        model.fit(X, Y, epochs=1, shuffle=False, verbose=0, callbacks=[logger])
        return [len(line.split(",")) for line in open(log)]


def numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): numbers(value[name]) for name in sorted(value)}
    if isinstance(value, list | tuple):
        return [numbers(one) for one in value]
    if isinstance(value, str | bool | np.bool_):
        return str(value)
    return np.asarray(value, "float64").tolist()


if __name__ == "__main__":
    keras.config.set_floatx("float64")
    for name in sys.argv[1:] or PROGRAMS:
        keras.utils.clear_session()
        if name != "unseeded_generators":
            keras.utils.set_random_seed(7)
        try:
            found = numbers(PROGRAMS[name]())
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        print("FOUND", json.dumps([name, found]), flush=True)
