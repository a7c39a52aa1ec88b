"""A model with wrong updates under one backend; a comparison must find the error.

``--model tests.comparison.wrong:model`` is wrong under the backend and in the way that
``WRONG=BACKEND:WAY`` names.
"""

from __future__ import annotations

import os
import sys

import keras
from keras import ops

from collective.training.calls import models


def lost(gradients):
    """Halve the gradients, as if one of two ranks had sent nothing."""
    return [g / 2 for g in gradients]


def rounded(gradients):
    """Round the gradients, as if they had travelled in 16 bits."""
    return [ops.cast(ops.cast(g, "bfloat16"), g.dtype) for g in gradients]


def flipped(gradients):
    """Flip the sign of the largest number in the smallest gradient."""
    smallest = min(
        range(len(gradients)), key=lambda i: gradients[i].shape.num_elements()
    )
    gradient = gradients[smallest]
    largest = ops.max(ops.abs(gradient))
    changed = ops.where(ops.abs(gradient) == largest, -gradient, gradient)
    return [changed if i == smallest else g for i, g in enumerate(gradients)]


WAYS = {way.__name__: way for way in (lost, rounded, flipped)}


class Wrong(keras.optimizers.SGD):
    """Changes the gradients before it applies them."""

    def apply(self, grads, trainable_variables=None):
        super().apply(
            WAYS[os.environ["WRONG"].split(":")[1]](grads), trainable_variables
        )


def model(input_shape, classes):
    """Return the built-in MLP, which is trained wrongly under one backend."""
    found = models.build("mlp", input_shape=input_shape, classes=classes)
    mine = sys.argv[sys.argv.index("--backend") + 1]
    right = os.environ["WRONG"].split(":")[0] != mine
    optimizer = (keras.optimizers.SGD if right else Wrong)(0.1)
    found.compile(
        optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return found
