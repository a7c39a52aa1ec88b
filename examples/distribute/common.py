"""Data, models and the file of results that all programs here share."""

from __future__ import annotations

import os

import keras
import numpy as np
import tensorflow as tf

FLOAT = os.environ.get("FLOATX", "float32")
keras.config.set_floatx(FLOAT)
ROWS, FEATURES, CLASSES = 60, 6, 3


def rows(count: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return points around three centers: ``x [count, 6]``, classes ``y [count]``."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, CLASSES, count)
    centers = np.random.default_rng(9).normal(size=(CLASSES, FEATURES))
    x = centers[y] + 0.7 * draw.normal(size=(count, FEATURES))
    return x.astype(FLOAT), y


def dataset(batch: int, count: int = ROWS, seed: int = 0) -> tf.data.Dataset:
    """Return the same points in batches."""
    return tf.data.Dataset.from_tensor_slices(rows(count, seed)).batch(batch)


def classifier() -> keras.Model:
    """Return a small model, the same in every run."""
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input((FEATURES,)), *layers])


def losses(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Return the loss of each row."""
    compute = keras.losses.sparse_categorical_crossentropy
    return compute(labels, logits, from_logits=True)


def finish(**results: object) -> None:
    """Print the results, and keep them in ``$OUT.RANK.npz`` for a comparison."""
    arrays = {}
    for name, value in results.items():
        parts = value if isinstance(value, list) else [value]
        for number, part in enumerate(parts):
            arrays[f"{name}{number}"] = np.asarray(part)
    for name, array in arrays.items():
        print(f"{name:12} {array.shape!s:10} {np.sum(array):.6f}")
    if "OUT" in os.environ:
        ranks = ("COLLECTIVE_RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
        rank = next((os.environ[name] for name in ranks if name in os.environ), "0")
        np.savez(f"{os.environ['OUT']}.{rank}.npz", **arrays)
