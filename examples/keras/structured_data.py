"""A table with numbers and words: preprocessing layers adapt, then join the model."""

import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers

ROWS = 443
CITIES = np.array(["Lisbon", "Oslo", "Quito", "Hanoi", "Perth"])
KINDS = np.array(["flat", "house", "studio"])


def make_table():
    """Return homes and, for each, whether it is expensive."""
    rng = np.random.default_rng(0)
    table = {
        "area": rng.gamma(6, 15, ROWS).astype("float32"),
        "age": rng.integers(0, 120, ROWS).astype("float32"),
        "city": rng.choice(CITIES, ROWS),
        "kind": rng.choice(KINDS, ROWS),
        "rooms": rng.integers(1, 7, ROWS),
    }
    price = table["area"] * np.where(table["city"] == "Oslo", 2, 1)
    price += 40 * (table["kind"] == "house") - 0.2 * table["age"]
    return table, (price > np.median(price)).astype("int32")


def main():
    keras.utils.set_random_seed(1)
    table, dear = make_table()
    inputs, features = {}, []
    for name in ("area", "age"):
        inputs[name] = keras.Input((1,), name=name)
        normalize = layers.Normalization()
        normalize.adapt(table[name][:, None])
        features.append(normalize(inputs[name]))
    for name in ("city", "kind"):
        inputs[name] = keras.Input((1,), name=name, dtype="string")
        lookup = layers.StringLookup()
        lookup.adapt(table[name])
        encode = layers.CategoryEncoding(lookup.vocabulary_size())
        features.append(encode(lookup(inputs[name])))
    inputs["rooms"] = keras.Input((1,), name="rooms", dtype="int32")
    rooms = layers.Embedding(8, 3)(inputs["rooms"])
    features.append(layers.Flatten()(rooms))

    hidden = layers.Dense(24, activation="relu")(layers.concatenate(features))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(
        keras.optimizers.Ftrl(0.1), "binary_crossentropy", metrics=["accuracy"]
    )
    columns = {name: values[:, None] for name, values in table.items()}
    data = tf.data.Dataset.from_tensor_slices((columns, dear)).batch(30)
    history = model.fit(data, epochs=4, verbose=2)
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
