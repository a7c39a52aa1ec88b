"""A callback fails on rank 0; ``test_callbacks`` starts this under mpirun.

``ranks_failing.py BACKEND raises | all_reduce | barrier``
"""

from __future__ import annotations

import sys

import keras
import tensorflow as tf

from collective import backends
from tests.training.small import train


class Fails(keras.callbacks.Callback):
    """Does a forbidden action, while other ranks continue."""

    def __init__(self, backend, how):
        super().__init__()
        self.backend = backend
        self.how = how

    def on_epoch_end(self, epoch, logs=None):
        if self.how == "raises":
            raise ValueError("the disk is full")
        if self.how == "all_reduce":
            self.backend.all_reduce([tf.ones(3)])

    def on_train_batch_end(self, batch, logs=None):
        if self.how == "barrier":
            self.backend.barrier()


if __name__ == "__main__":
    made = backends.get(sys.argv[1])
    train(made, [Fails(made, sys.argv[2])])
    print("trained")
