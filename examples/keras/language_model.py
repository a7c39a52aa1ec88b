"""A language model of characters: the loss is taken over the tokens of all rows."""

import sys

import keras
import numpy as np
from keras import layers, ops

TEXT = (
    "rain on the roof and rain on the road, the river rises and the river is brown; "
    "one boat is moored and one boat has gone, who rows in the rain rows alone. "
)
LENGTH = 15


def make_data():
    """Return windows of the text; the target of each character is the next one."""
    text = TEXT * 3
    characters = sorted(set(text))
    tokens = np.array([characters.index(c) for c in text], "int32")
    starts = np.arange(len(tokens) - LENGTH - 1)
    windows = tokens[starts[:, None] + np.arange(LENGTH + 1)]
    return windows[:, :-1], windows[:, 1:], len(characters)


def token_loss(y_true, y_pred):
    """Return the cross entropy of every token, as one long list."""
    classes = ops.shape(y_pred)[-1]
    return keras.losses.sparse_categorical_crossentropy(
        ops.reshape(y_true, [-1]), ops.reshape(y_pred, [-1, classes]), from_logits=True
    )


def perplexity(y_true, y_pred):
    """Return the exponential of the cross entropy, for each row."""
    loss = keras.losses.sparse_categorical_crossentropy(
        y_true, y_pred, from_logits=True
    )
    return ops.exp(ops.mean(loss, axis=-1))


def main():
    keras.utils.set_random_seed(1)
    x, y, characters = make_data()
    model = keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            layers.Embedding(characters, 12),
            layers.GRU(32, return_sequences=True),
            layers.Dense(characters),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.2, momentum=0.9, global_clipnorm=1.0),
        token_loss,
        metrics=["accuracy", perplexity],
    )
    history = model.fit(x, y, batch_size=32, epochs=3, shuffle=False, verbose=2)
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
