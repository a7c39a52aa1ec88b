"""Recommendations by factors: embeddings of many users and items."""

import sys

import keras
import numpy as np
from keras import layers

USERS, ITEMS, FACTORS, RATINGS = 5003, 2003, 12, 1511


def make_ratings():
    """Return users, items and ratings; few users rate many items."""
    rng = np.random.default_rng(0)
    user = (USERS * rng.power(0.4, RATINGS)).astype("int32")
    item = (ITEMS * rng.power(0.4, RATINGS)).astype("int32")
    taste = rng.normal(size=(USERS, 2))
    kind = rng.normal(size=(ITEMS, 2))
    stars = 3 + (taste[user] * kind[item]).sum(axis=1)
    return user, item, stars.clip(1, 5).astype("float32")


def main():
    keras.utils.set_random_seed(1)
    user, item, stars = make_ratings()

    inputs = [keras.Input((), dtype="int32", name=n) for n in ("user", "item")]
    tables = [
        layers.Embedding(rows, FACTORS, embeddings_initializer="glorot_normal")
        for rows in (USERS, ITEMS)
    ]
    offsets = [layers.Embedding(rows, 1) for rows in (USERS, ITEMS)]
    match = layers.Dot(axes=1)([t(i) for t, i in zip(tables, inputs, strict=True)])
    rating = layers.Add()(
        [match, *(o(i) for o, i in zip(offsets, inputs, strict=True))]
    )
    model = keras.Model(inputs, layers.Dense(1)(rating))
    model.compile(
        keras.optimizers.SGD(1.0),
        "mse",
        metrics=[keras.metrics.RootMeanSquaredError(name="rmse")],
    )
    history = model.fit(
        [user, item], stars, batch_size=128, epochs=3, shuffle=False, verbose=2
    )
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    best = model.predict([np.full(ITEMS, user[0]), np.arange(ITEMS)], verbose=0)
    print(f"best_rating: {best.max():.9g}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
