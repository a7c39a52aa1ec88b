"""Several labels for each row: AUC, precision, recall and F1 as metrics."""

import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers

LABELS = 5


def make_data(rows, seed):
    """Return features, and the labels that hold for each row."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 14))
    truth = np.random.default_rng(7).normal(size=(14, LABELS))
    return x, (x @ truth + rng.normal(size=(rows, LABELS)) > 1.5).astype("float32")


def main():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((14,)),
            layers.Dense(32, activation="relu"),
            layers.Dense(LABELS, activation="sigmoid"),
        ]
    )
    model.compile(
        keras.optimizers.Lion(1e-3),
        keras.losses.BinaryFocalCrossentropy(gamma=1.5),
        metrics=[
            keras.metrics.AUC(multi_label=True, num_labels=LABELS, name="auc"),
            keras.metrics.AUC(curve="PR", name="pr"),
            keras.metrics.Precision(name="precision"),
            keras.metrics.Recall(thresholds=[0.3, 0.5], name="recall"),
            keras.metrics.F1Score(average="macro", threshold=0.5, name="f1"),
        ],
    )
    train = tf.data.Dataset.from_tensor_slices(make_data(401, seed=0))
    test = tf.data.Dataset.from_tensor_slices(make_data(107, seed=1))
    history = model.fit(
        train.cache().batch(35, drop_remainder=True),
        epochs=3,
        validation_data=test.batch(40),
        verbose=0,
    )
    for name, values in history.history.items():
        numbers = np.ravel(values[-1])
        print(f"{name}: {' '.join(f'{number:.9g}' for number in numbers)}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
