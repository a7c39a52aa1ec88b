"""Text classification: strings in, TextVectorization inside the model."""

import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers

GOOD = ["wonderful", "lovely", "brilliant", "warm", "funny", "clever"]
BAD = ["dull", "boring", "clumsy", "cold", "tired", "pointless"]
OTHER = ["the", "film", "plot", "was", "and", "with", "very", "a", "music", "in"]


def make_reviews(rows, seed):
    """Return sentences of unequal length; the label is the more frequent kind of word."""
    rng = np.random.default_rng(seed)
    texts, labels = [], []
    for _ in range(rows):
        label = rng.integers(0, 2)
        telling = rng.choice(GOOD if label else BAD, rng.integers(1, 4))
        words = [*rng.choice(OTHER, rng.integers(3, 12)), *telling]
        texts.append(" ".join(rng.permutation(words)) + ".")
        labels.append(label)
    return np.array(texts), np.array(labels, "float32")


def main():
    keras.utils.set_random_seed(1)
    texts, labels = make_reviews(389, seed=0)

    vectorize = layers.TextVectorization(max_tokens=40, output_sequence_length=14)
    vectorize.adapt(texts)
    words = keras.Input((), dtype="string")
    x = layers.Embedding(vectorize.vocabulary_size(), 16)(vectorize(words))
    x = layers.Conv1D(16, 3, activation="relu")(x)
    x = layers.GlobalMaxPooling1D()(x)
    model = keras.Model(words, layers.Dense(1, activation="sigmoid")(x))

    model.compile(
        keras.optimizers.Adagrad(0.05), "binary_crossentropy", metrics=["accuracy"]
    )
    data = tf.data.Dataset.from_tensor_slices((texts, labels)).batch(20)
    test = tf.data.Dataset.from_tensor_slices(make_reviews(97, seed=1)).batch(20)
    history = model.fit(data, epochs=4, validation_data=test, verbose=2)
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")

    sentences = tf.constant(["a dull plot.", "the music was lovely and warm."])
    for value in model.predict(sentences, verbose=0)[:, 0]:
        print(f"positive: {value:.9g}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
