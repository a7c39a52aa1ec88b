"""A Siamese network: pairs that belong together end close, the others far apart."""

import sys

import keras
import numpy as np
from keras import layers, ops

PAIRS, FEATURES, KINDS = 367, 14, 5


def make_pairs():
    """Return pairs of noisy points, and 1 for each pair of one kind."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(KINDS, FEATURES))
    kinds = rng.integers(0, KINDS, (PAIRS, 2))
    kinds[::2, 1] = kinds[::2, 0]
    points = centres[kinds] + 0.7 * rng.normal(size=(PAIRS, 2, FEATURES))
    same = kinds[:, 0] == kinds[:, 1]
    return points[:, 0], points[:, 1], same.astype("float32")[:, None]


def contrastive_loss(margin=1.0):
    """Make a loss that pulls pairs together, or apart up to the margin."""

    def loss(y_true, distance):
        near = y_true * ops.square(distance)
        far = (1 - y_true) * ops.square(ops.maximum(margin - distance, 0))
        return ops.mean(near + far)

    return loss


def same_kind(y_true, distance):
    """Return how often the distance tells rightly whether a pair is of one kind."""
    return ops.cast(ops.equal(y_true > 0.5, distance < 0.5), "float32")


def main():
    keras.utils.set_random_seed(1)
    left, right, same = make_pairs()

    embed = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(20, activation="relu"),
            layers.Dense(6),
            layers.UnitNormalization(),
        ]
    )
    first, second = keras.Input((FEATURES,)), keras.Input((FEATURES,))
    squared = ops.sum(ops.square(embed(first) - embed(second)), axis=-1, keepdims=True)
    distance = ops.sqrt(squared + 1e-6)
    model = keras.Model([first, second], distance)
    model.compile(
        keras.optimizers.RMSprop(1e-3), contrastive_loss(), metrics=[same_kind]
    )
    history = model.fit(
        (left, right), same, batch_size=25, epochs=3, shuffle=False, verbose=2
    )
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    if len(sys.argv) > 1:
        embed.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
