"""One rank: loops that ``--loops`` cannot make those of one process, each by name.

    collectiverun -np 2 --keras --loops tests/training/unedited/refused_loops.py

Prints ``NAME: what was raised``, for each.
"""

import keras
import numpy as np
import tensorflow as tf

RANDOM = np.random.default_rng(1)
X = RANDOM.normal(size=(24, 4)).astype("float32")
Y = RANDOM.normal(size=(24, 2)).astype("float32")
DATA = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12)


def model():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


def pairs():
    """Each row is compared with each other."""
    net, optimizer = model(), keras.optimizers.SGD(0.1)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            made = net(x)
            loss = tf.reduce_mean(tf.square(made @ tf.transpose(made)))
        optimizer.apply(tape.gradient(loss, net.weights), net.weights)
        return loss

    for x, y in DATA:
        train_step(x, y)


def centred():
    """Eagerly, and by what the rows have together."""
    net, optimizer = model(), keras.optimizers.SGD(0.1)
    for x, y in DATA:
        with tf.GradientTape() as tape:
            made = net(x)
            loss = tf.reduce_mean(tf.abs(made - tf.reduce_mean(made, 0) - y))
        optimizer.apply(tape.gradient(loss, net.weights), net.weights)


def iterator():
    """The step takes its batch itself."""
    net, optimizer = model(), keras.optimizers.SGD(0.1)

    @tf.function
    def train_step(batches):
        x, y = next(batches)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(net(x) - y))
        optimizer.apply(tape.gradient(loss, net.weights), net.weights)

    train_step(iter(DATA))


def largest():
    """A variable of the program's own, no mean."""
    net, optimizer = model(), keras.optimizers.SGD(0.1)
    most = tf.Variable(-9.0)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(net(x) - y))
        optimizer.apply(tape.gradient(loss, net.weights), net.weights)
        most.assign(tf.maximum(most, tf.reduce_max(x)))

    for x, y in DATA:
        train_step(x, y)


def returned():
    """What it returns is not a sum or mean."""
    net, optimizer = model(), keras.optimizers.SGD(0.1)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(net(x) - y))
        optimizer.apply(tape.gradient(loss, net.weights), net.weights)
        return tf.reduce_max(x)

    for x, y in DATA:
        train_step(x, y)


def on_batch():
    """A compiled loss that couples rows."""
    net = model()
    net.compile("sgd", lambda y, made: tf.square(made - tf.reduce_mean(made, 0)))
    net.train_on_batch(X, Y)


for case in (pairs, centred, iterator, largest, returned, on_batch):
    try:
        case()
        print(f"{case.__name__}: nothing")
    except Exception as error:
        print(f"{case.__name__}: {type(error).__name__} {error}".replace("\n", " "))
