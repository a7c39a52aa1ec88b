"""Sparse gradients: ranks send the rows of an embedding that they looked up."""

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

hvd.init()
keras.utils.set_random_seed(hvd.rank())

WORDS, LENGTH = 1000, 6
random = np.random.default_rng(hvd.rank())
words = random.integers(0, WORDS, size=(128, LENGTH))
label = (words < WORDS // 2).mean(1, keepdims=True).astype("float32")

model = keras.Sequential(
    [
        keras.Input((LENGTH,), dtype="int32"),
        keras.layers.Embedding(WORDS, 8),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1),
    ]
)
optimizer = keras.optimizers.SGD(0.5)
# Horovod takes variables of TensorFlow, not of Keras 3; collective takes both.
weights = [variable.value for variable in model.trainable_variables]
hvd.broadcast_variables(weights, root_rank=0)


@tf.function
def step():
    """Make one update; return the loss of all ranks."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(words, training=True) - label))
    # sparse_as_dense=True would send the whole table instead.
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, weights)
    assert isinstance(gradients[0], tf.IndexedSlices)
    optimizer.apply(gradients, model.trainable_variables)
    return hvd.allreduce(loss)


losses = [float(step()) for _ in range(20)]
if hvd.rank() == 0:
    print(f"sparse_embeddings: loss {losses[0]:.3f} to {losses[-1]:.3f}")
