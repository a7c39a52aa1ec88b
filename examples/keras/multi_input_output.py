"""A functional model with two inputs and two outputs, each with its own loss."""

import sys

import keras
import numpy as np
from keras import layers

ROWS, WORDS, TAGS, DEPARTMENTS = 431, 50, 6, 4


def make_data():
    """Return tickets: title words and tags; a priority and a department for each."""
    rng = np.random.default_rng(0)
    title = rng.integers(1, WORDS, (ROWS, 9))
    tags = rng.integers(0, 2, (ROWS, TAGS)).astype("float32")
    priority = 1 / (1 + np.exp(-tags @ rng.normal(size=TAGS)))
    department = (title.sum(1) + tags[:, 0]).astype("int32") % DEPARTMENTS
    return (
        {"title": title, "tags": tags},
        {"priority": priority[:, None], "department": department},
    )


def make_model():
    title = keras.Input((None,), dtype="int32", name="title")
    tags = keras.Input((TAGS,), name="tags")
    words = layers.Embedding(WORDS, 16)(title)
    sentence = layers.GlobalAveragePooling1D()(layers.Conv1D(16, 3)(words))
    both = layers.Dense(24, activation="gelu")(layers.concatenate([sentence, tags]))
    priority = layers.Dense(1, activation="sigmoid", name="priority")(both)
    department = layers.Dense(DEPARTMENTS, name="department")(both)
    return keras.Model([title, tags], {"priority": priority, "department": department})


def main():
    keras.utils.set_random_seed(1)
    x, y = make_data()
    model = make_model()
    model.compile(
        optimizer=keras.optimizers.RMSprop(2e-3),
        loss={
            "priority": keras.losses.MeanSquaredError(),
            "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        },
        loss_weights={"priority": 1.0, "department": 0.2},
        metrics={"priority": ["mae"], "department": ["accuracy"]},
    )
    history = model.fit(x, y, batch_size=30, epochs=3, shuffle=False, verbose=2)
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")

    results = model.evaluate(x, y, batch_size=64, verbose=0, return_dict=True)
    for name, value in results.items():
        print(f"test_{name}: {value:.9g}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
