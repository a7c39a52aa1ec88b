"""Losses and metrics that couple rows, and look-ups in tables."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import ops

FEATURES = 5


def rows(count, seed=3, outputs=2):
    """Return different rows, with labels 0 or 1."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)).astype(keras.config.floatx())
    y = (rng.uniform(size=(count, outputs)) > 0.5).astype(keras.config.floatx())
    return x, y


def network(loss, metrics=(), outputs=2, activation="sigmoid", **compiled):
    def make():
        keras.utils.set_random_seed(7)
        inputs = keras.Input([FEATURES])
        hidden = keras.layers.Dense(
            6, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01)
        )(inputs)
        predicted = keras.layers.Dense(outputs, activation=activation)(hidden)
        model = keras.Model(inputs, predicted)
        chosen = [m if isinstance(m, str) else m() for m in metrics]
        model.compile(keras.optimizers.Adam(0.02), loss, metrics=chosen, **compiled)
        return model

    return make


def contrastive(y, predicted):
    """Return a loss of each row against all others, without y."""
    near = ops.matmul(predicted, ops.transpose(predicted))
    return -ops.log_softmax(near, axis=-1)[:, 0] + 0.0 * y[:, 0]


def summed(y, predicted):
    """Return a scalar, as many losses on the web return."""
    return ops.sum(ops.square(y - predicted))


def correlated(y, predicted):
    """Return one minus a correlation over the rows of the batch."""
    a, b = y - ops.mean(y, axis=0), predicted - ops.mean(predicted, axis=0)
    return 1 - ops.sum(a * b) / (
        ops.sqrt(ops.sum(a * a) * ops.sum(b * b)) + ops.cast(1e-3, b.dtype)
    )


class Largest(keras.metrics.Metric):
    """The largest error so far."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y, predicted, sample_weight=None):
        error = ops.cast(ops.max(ops.abs(y - predicted)), self.value.dtype)
        self.value.assign(ops.maximum(self.value, error))

    def result(self):
        # A variable itself would be read after the validation has changed it.
        return self.value + 0


class Last(Largest):
    """The prediction of the last row so far, and the number of rows."""

    def __init__(self):
        super().__init__()
        self.name = "last"
        self.rows = self.add_variable((), "zeros", dtype="int64", name="rows")

    def update_state(self, y, predicted, sample_weight=None):
        self.value.assign(ops.cast(predicted[-1, 0], self.value.dtype))
        self.rows.assign(self.rows + ops.cast(ops.shape(y)[0], "int64"))

    def result(self):
        return self.value + ops.cast(self.rows, self.value.dtype)


class BatchRank(keras.metrics.Metric):
    """The mean over batches of the share of pairs in the right order: an AUC each."""

    def __init__(self):
        super().__init__(name="batch_rank")
        self.total = self.add_variable((), "zeros", name="total")
        self.batches = self.add_variable((), "zeros", name="batches")

    def update_state(self, y, predicted, sample_weight=None):
        positive = y[:, 0] > 0.5
        pairs = ops.logical_and(positive[:, None], ops.logical_not(positive)[None])
        right = ops.logical_and(pairs, predicted[:, :1] > predicted[:, 0][None])
        count = ops.maximum(ops.sum(ops.cast(pairs, self.total.dtype)), 1)
        self.total.assign_add(ops.sum(ops.cast(right, self.total.dtype)) / count)
        self.batches.assign_add(1)

    def result(self):
        return self.total / ops.maximum(self.batches, 1)


class OwnLoss(keras.Model):
    """Has a loss of x, of the weights, of the rows and of the forward pass' losses."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        coupled = correlated(y, y_pred) + ops.std(ops.sum(x, axis=1)) * ops.mean(y_pred)
        penalty = 0.1 * ops.sum(ops.square(self.layers[-1].kernel))
        again = ops.var(self(x[:, ::-1]))
        return coupled + penalty + again + ops.sum(self.losses)


def own_loss():
    keras.utils.set_random_seed(7)
    inputs = keras.Input([FEATURES])
    regular = keras.regularizers.L2(0.01)
    hidden = keras.layers.Dense(6, "tanh", kernel_regularizer=regular)(inputs)
    model = OwnLoss(inputs, keras.layers.Dense(2, "sigmoid")(hidden))
    model.compile(keras.optimizers.Adam(0.02))
    return model


def two_outputs():
    keras.utils.set_random_seed(7)
    inputs = keras.Input([FEATURES])
    hidden = keras.layers.Dense(6, "tanh")(inputs)
    first = keras.layers.Dense(2, "sigmoid", name="first")(hidden)
    second = keras.layers.Dense(2, name="second")(hidden)
    model = keras.Model(inputs, {"first": first, "second": second})
    model.compile(
        keras.optimizers.Adam(0.02),
        {"first": keras.losses.Dice(), "second": "mse"},
        loss_weights={"first": 0.7, "second": 0.4},
        metrics={"first": [Largest()], "second": ["mae"]},
    )
    return model


def masked():
    """Return a model in which the mask of y_pred removes positions with token 0."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input([4], dtype="int32")
    vectors = keras.layers.Embedding(5, 6, mask_zero=True)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(vectors))
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def tokens(count, seed=5):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 5, (count, 4)).astype("int32")
    x[:, 0] = 1  # no row is masked completely
    return x, rng.integers(0, 3, (count, 4)).astype("int64")


METRICS = (Largest, Last, BatchRank, keras.metrics.MeanSquaredError)
CASES = {
    "dice": (lambda: network(keras.losses.Dice()), rows),
    "circle": (
        lambda: network(keras.losses.Circle(), outputs=4, activation=ops.normalize),
        lambda n, seed=3: (rows(n, seed)[0], np.arange(n, dtype="int32") % 3),
    ),
    "contrastive": (lambda: network(contrastive, activation=None), rows),
    "scalar-sum": (lambda: network(summed, ["mae"]), rows),
    "correlation": (lambda: network(correlated, METRICS), rows),
    "metrics-alone": (
        lambda: network("mse", METRICS),
        rows,
    ),
    "weights": (
        lambda: network(keras.losses.Dice(), weighted_metrics=["mae"], metrics=METRICS),
        lambda n, seed=3: (*rows(n, seed), np.linspace(0.5, 2, n)),
    ),
    "own-loss": (lambda: own_loss, rows),
    "two-outputs": (
        lambda: two_outputs,
        lambda n, seed=3: (
            rows(n, seed)[0],
            {"first": rows(n, seed)[1], "second": rows(n, seed + 1)[1]},
        ),
    ),
    "masked": (lambda: masked, tokens),
}


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.05, clipnorm=1.0),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.02),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "sgd": lambda: keras.optimizers.SGD(0.5, clipvalue=1e-3),
}


def looked_up(optimizer, masked=False):
    """Return a model in which a batch, and a row, look up a row of a table repeatedly."""

    def make():
        keras.utils.set_random_seed(4)
        tokens = keras.Input((None,), dtype="int32")
        table = keras.layers.Embedding(7, 3, mask_zero=masked)(tokens)
        outputs = keras.layers.Dense(1)(keras.layers.LSTM(4)(table))
        model = keras.Model(tokens, outputs)
        model.compile(OPTIMIZERS[optimizer](), "mse")
        return model

    return make


def sentences(count, seed=5):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 7, (count, 6)), rng.normal(size=(count, 1))


class Bag(keras.layers.Layer):
    """Sums the table's rows for the tokens of a row other than 0.

    Args:
        distinct: Whether a batch looks up each row of the table once.
    """

    def __init__(self, distinct):
        super().__init__()
        self.distinct = distinct

    def build(self, shape):
        self.table = self.add_weight(shape=(7, 3), name="table")

    def call(self, x):
        if self.distinct:
            given = tf.sparse.from_dense(x)
            return tf.nn.embedding_lookup_sparse(
                self.table.value, given, None, combiner="sum"
            )
        vectors = tf.gather(self.table.value, tf.boolean_mask(x, x > 0))
        rows = tf.where(x > 0)[:, 0]
        return tf.math.unsorted_segment_sum(vectors, rows, tf.shape(x)[0])

    def compute_output_shape(self, shape):
        return (shape[0], 3)


def bag(distinct):
    def make():
        keras.utils.set_random_seed(4)
        tokens = keras.Input((6,), dtype="int32")
        outputs = keras.layers.Dense(1)(Bag(distinct)(tokens))
        model = keras.Model(tokens, outputs)
        model.compile(keras.optimizers.Adam(0.05), "mse")
        return model

    return make


def bags(count, seed=5):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 7, (count, 6)).astype("int32")
    x[:, :2] = 1 + x[:, :2] // 2
    x[::3, 2:] = 0
    return x, rng.normal(size=(count, 1))


CASES |= {
    "look-ups, adam": (lambda: looked_up("adam", True), sentences),
    "look-ups, rmsprop": (lambda: looked_up("rmsprop"), sentences),
    "look-ups, ftrl": (lambda: looked_up("ftrl"), sentences),
    "look-ups, sgd": (lambda: looked_up("sgd"), sentences),
    "look-ups, a bag": (lambda: bag(False), bags),
    "look-ups, a sparse bag": (lambda: bag(True), bags),
}
