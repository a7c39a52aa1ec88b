"""One process: trains programs that draw at random, and keeps all their results.

    python tests/training/unedited/random_programs.py FOLDER FLOATX NAME ...
    collectiverun -np 2 --keras tests/training/unedited/random_programs.py FOLDER FLOATX NAME ...

Rank R writes ``R.npz``: history, evaluation, predictions and variables of each program, with
the next numbers of Python's and NumPy's generators. It imports nothing of ours except a module
with its rank, and shuffles by default.
"""

import os
import random
import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

ROWS, BATCH = 23, 10  # batches of 10, 10 and 3 rows
GENERATORS = []  # holds one, which no layer tracks


class Sampling(layers.Layer):
    """The latent variables of a VAE; in prediction, too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(11)

    def call(self, x):
        mean, spread = x[:, :2], x[:, 2:4]
        self.add_loss(ops.mean(mean**2))
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + spread * noise


class Noise(layers.Layer):
    """Adds noise from a seed of each kind."""

    def call(self, x):
        for seed in (None, 5, *GENERATORS):
            x = x + 0.1 * keras.random.normal(ops.shape(x), seed=seed)
        return x


class SpecAugment(layers.Layer):
    """Masks a random run of each row's columns."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(2)

    def call(self, x, training=False):
        if not training:
            return x
        width, places = x.shape[1], (ops.shape(x)[0], 1)
        start = keras.random.randint(places, 0, width - 2, seed=self.seed_generator)
        size = keras.random.randint(places, 0, 3, seed=self.seed_generator)
        columns = ops.arange(width, dtype="int32")[None]
        masked = ops.logical_and(columns >= start, columns < start + size)
        return ops.where(masked[:, :, None], ops.zeros_like(x), x)


class OwnStep(keras.Model):
    """Has its own training step, with noise, dropout and batch normalization."""

    def __init__(self):
        super().__init__()
        self.hidden, self.drop = layers.Dense(4), layers.Dropout(0.3)
        self.normal, self.out = layers.BatchNormalization(), layers.Dense(2)
        self.noise = keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        hidden = self.drop(self.hidden(x), training=training)
        return self.out(self.normal(hidden, training=training))

    def train_step(self, data):
        x, y = data
        x = x + 0.1 * keras.random.normal(ops.shape(x), seed=self.noise)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


class TwoViews(layers.Layer):
    """Makes both views of each row in one batch, as contrastive models do."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inner, self.drop = layers.Dense(4), layers.Dropout(0.3)

    def call(self, x, training=False):
        views = ops.concatenate([x, -x], axis=0)
        hidden = self.drop(self.inner(views), training=training)
        return ops.concatenate(ops.split(hidden, 2), axis=1)


class Adversary(OwnStep):
    """Gets generated and real rows in one batch, with noise on its labels."""

    def train_step(self, data):
        found, (x, y) = super().train_step(data), data
        made = keras.random.normal(ops.shape(x), seed=self.noise)
        both = ops.concatenate([made, x], axis=0)
        labels = ops.concatenate([ops.ones_like(y), ops.zeros_like(y)], axis=0)
        labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.noise)
        with tf.GradientTape() as tape:
            seen = self.out(self.drop(self.hidden(both), training=True))
            loss = ops.mean((labels - seen) ** 2)
        variables = self.hidden.trainable_variables + self.out.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {**found, "adversary": loss}


class Items(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return -(-ROWS // 4)

    def __getitem__(self, index):
        rows = slice(4 * index, 4 * index + 4)
        return self.x[rows], self.y[rows]


def chain(shape, *inner):
    return keras.Sequential(
        [keras.Input(shape), *inner, layers.Flatten(), layers.Dense(2)]
    )


def attention():
    inputs = keras.Input((4, 6))
    hidden = layers.MultiHeadAttention(2, 3, dropout=0.3)(inputs, inputs)
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(hidden)))


def augmentation():
    turned = [layers.RandomRotation(0.2)] if keras.config.floatx() == "float32" else []
    return chain(
        IMAGE,
        layers.RandomFlip(),
        *turned,  # for which stock Keras raises a TypeError in float64
        layers.RandomTranslation(0.2, 0.2),
        layers.RandomZoom(0.3),
        layers.RandomContrast(0.3),
        layers.RandomBrightness(0.2, value_range=(-3, 3)),
    )


IMAGE, VECTOR, SERIES = (6, 6, 3), (5,), (4, 6)
# For each program: the shape of a row, and the maker of the model.
PROGRAMS = {
    "dropout": (VECTOR, lambda: chain(VECTOR, layers.Dense(8), layers.Dropout(0.3))),
    "spatial": (
        IMAGE,
        lambda: chain(IMAGE, layers.SpatialDropout2D(0.4), layers.AlphaDropout(0.1)),
    ),
    "gaussian": (
        VECTOR,
        lambda: chain(VECTOR, layers.GaussianNoise(0.3), layers.GaussianDropout(0.3)),
    ),
    "augmentation": (IMAGE, augmentation),
    "erasing": (
        IMAGE,
        lambda: chain(IMAGE, layers.RandomErasing(), layers.RandomGrayscale()),
    ),
    "batch_norm": (
        IMAGE,
        lambda: chain(
            IMAGE,
            layers.Conv2D(4, 3),
            layers.BatchNormalization(momentum=0.8),
            layers.Dropout(0.2),
        ),
    ),
    "vae": (VECTOR, lambda: chain(VECTOR, layers.Dense(4), Sampling())),
    "noise": (VECTOR, lambda: chain(VECTOR, Noise(), layers.Dense(4), Noise())),
    "spec_augment": (SERIES, lambda: chain(SERIES, SpecAugment(), layers.Conv1D(3, 2))),
    "lstm": (
        SERIES,
        lambda: chain(SERIES, layers.LSTM(6, dropout=0.3, recurrent_dropout=0.2)),
    ),
    "attention": (SERIES, attention),
    "own_step": (VECTOR, OwnStep),
    "two_views": (VECTOR, lambda: chain(VECTOR, TwoViews())),
    "adversary": (VECTOR, Adversary),
    "items": (VECTOR, lambda: chain(VECTOR, layers.Dropout(0.3))),
    "within_batches": (VECTOR, lambda: chain(VECTOR, layers.Dropout(0.3))),
    "shuffled_dataset": (VECTOR, lambda: chain(VECTOR, layers.Dropout(0.3))),
    "one_dataset": (VECTOR, lambda: chain(VECTOR, layers.Dropout(0.3))),
}


def data(name, x, y):
    """Return the arguments of ``fit`` for data."""
    if name == "items":
        return {"x": Items(x, y)}
    if name == "shuffled_dataset":
        whole = tf.data.Dataset.from_tensor_slices((x, y))
        return {"x": whole.shuffle(ROWS).batch(BATCH)}
    if name == "one_dataset":  # each of its iterators has another order
        shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=3)
        one = shuffled.batch(BATCH)
        return {"x": one, "validation_data": one, "validation_batch_size": None}
    more = {"shuffle": "batch"} if name == "within_batches" else {}
    return {"x": x, "y": y, "batch_size": BATCH} | more


def train(name, folder):
    """Train the program; return all its results by name."""
    shape, make = PROGRAMS[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, *shape)).astype(keras.config.floatx())
    y = rng.normal(size=(ROWS, 2)).astype(x.dtype)
    GENERATORS[:] = [keras.random.SeedGenerator(5)]
    model = make()
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"])
    validation = {"validation_data": (x[:9], y[:9]), "validation_batch_size": 4}
    history = model.fit(epochs=3, verbose=0, **validation | data(name, x, y)).history
    found = {f"history {key}": values for key, values in history.items()}
    found["evaluated"] = model.evaluate(x, y, batch_size=7, verbose=0)
    for i, rows in enumerate((x, x[:1], x)):
        found[f"predicted {i}"] = model.predict(rows, batch_size=7, verbose=0)
    path = os.path.join(folder, f"{name}.weights.h5")
    model.save_weights(path)
    for i, variable in enumerate(model.variables):
        found[f"variable {i} {variable.name}"] = keras.ops.convert_to_numpy(variable)
    model.load_weights(path)
    for i, weight in enumerate(model.get_weights()):
        found[f"file {i}"] = weight
    found["generators"] = [random.random(), np.random.rand()]
    return {f"{name} {key}": np.asarray(value) for key, value in found.items()}


def main(folder, floatx, *names):
    keras.config.set_floatx(floatx)
    found = {}
    for name in names:
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        found |= train(name, folder)
    rank = os.environ.get("COLLECTIVE_RANK", "0")
    np.savez(os.path.join(folder, f"{rank}.npz"), **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
