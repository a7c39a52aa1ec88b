"""Loops whose steps couple rows, or keep a value of a whole batch.

    collectiverun -np 2 --keras --loops tests/training/unedited/hard_loops.py

It prints ``NAME: numbers`` for each, which must equal one process.
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
    """Train with a loss that compares each row with every other."""
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
    return net.get_weights()


def centred():
    """Train eagerly, with a common value of all rows."""
    net, optimizer = model(), keras.optimizers.SGD(0.1)
    for x, y in DATA:
        with tf.GradientTape() as tape:
            made = net(x)
            loss = tf.reduce_mean(tf.abs(made - tf.reduce_mean(made, 0) - y))
        optimizer.apply(tape.gradient(loss, net.weights), net.weights)
    return net.get_weights()


def iterator():
    """Train with a step that reads its batch itself."""
    net, optimizer = model(), keras.optimizers.SGD(0.1)

    @tf.function
    def train_step(batches):
        x, y = next(batches)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(net(x) - y))
        optimizer.apply(tape.gradient(loss, net.weights), net.weights)

    train_step(iter(DATA))
    return net.get_weights()


def largest():
    """Train with a variable of the program, which is not a mean."""
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
    return [most.numpy(), *net.get_weights()]


def returned():
    """Train with a step whose result is not a sum or mean."""
    net, optimizer = model(), keras.optimizers.SGD(0.1)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(net(x) - y))
        optimizer.apply(tape.gradient(loss, net.weights), net.weights)
        return tf.reduce_max(x)

    return [train_step(x, y).numpy() for x, y in DATA] + net.get_weights()


def on_batch():
    """Train on batches with a compiled loss that couples rows."""
    net = model()
    net.compile("sgd", lambda y, made: tf.square(made - tf.reduce_mean(made, 0)))
    for rows in (24, 7, 1):
        net.train_on_batch(X[:rows], Y[:rows])
    tested = net.test_on_batch(X[:5], Y[:5])
    return [tested, net.predict_on_batch(X[:3]), *net.get_weights()]


def branches():
    """Train with AutoGraph's ``if`` and ``for``, which contain sums over rows."""
    net, optimizer = model(), keras.optimizers.SGD(0.1)

    @tf.function
    def train_step(x, y, epoch):
        with tf.GradientTape() as tape:
            made = net(x)
            loss = tf.reduce_mean(tf.square(made - y))
            if epoch > 0 and tf.reduce_mean(made) < 10.0:
                loss += tf.reduce_mean(tf.abs(made - tf.reduce_mean(made, 0)))
            for i in tf.range(2):
                loss += 0.1 * tf.reduce_max(made) * tf.cast(i, tf.float32)
        optimizer.apply(tape.gradient(loss, net.weights), net.weights)
        return {"loss": loss, "rows": made}

    for epoch in range(3):
        for x, y in DATA:
            found = train_step(x, y, tf.constant(epoch))
    return [found["loss"].numpy(), found["rows"].numpy(), *net.get_weights()]


for case in (pairs, centred, iterator, largest, returned, on_batch, branches):
    numbers = [np.ravel(value) for value in case()]
    print(f"{case.__name__}:", *np.concatenate(numbers).tolist())
