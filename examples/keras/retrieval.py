"""Two towers: every query is compared with all items of its batch."""

import sys

import keras
import numpy as np
from keras import layers, ops

ROWS, FEATURES, WIDTH = 349, 9, 8


def in_batch_softmax(y_true, y_pred):
    """Return the cross entropy of finding each query's item in the whole batch."""
    queries, items = y_pred[:, :WIDTH], y_pred[:, WIDTH:]
    scores = ops.matmul(queries, ops.transpose(items)) / 0.2
    own = ops.arange(ops.shape(scores)[0])
    return keras.losses.sparse_categorical_crossentropy(own, scores, from_logits=True)


def tower(name):
    """Return a model from features to a vector of length one."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(24, activation="tanh"),
            layers.Dense(WIDTH),
            layers.UnitNormalization(),
        ],
        name=name,
    )


def main():
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(ROWS, FEATURES)).astype("float32")
    items = np.tanh(queries @ rng.normal(size=(FEATURES, FEATURES)).astype("float32"))

    query, item = keras.Input((FEATURES,)), keras.Input((FEATURES,))
    both = layers.concatenate([tower("query")(query), tower("item")(item)])
    model = keras.Model([query, item], both)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), in_batch_softmax)
    history = model.fit(
        [queries, items],
        np.zeros(ROWS),
        batch_size=60,
        epochs=4,
        shuffle=False,
        verbose=2,
    )
    for name, values in history.history.items():
        print(f"{name}: {' '.join(f'{value:.9g}' for value in values)}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
