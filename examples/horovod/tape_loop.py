"""A custom training loop: gradient tape, compiled step, broadcast at the start."""

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

hvd.init()
keras.utils.set_random_seed(hvd.rank())

random = np.random.default_rng(hvd.rank())  # each rank has data of its own
true = np.linspace(-1, 1, 8)[:, None]
x = random.normal(size=(256, 8)).astype("float32")
y = (x @ true + 0.01 * random.normal(size=(256, 1))).astype("float32")
batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(32).repeat()

model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.05)
optimizer.build(model.trainable_variables)
# Horovod takes variables of TensorFlow, not of Keras 3; collective takes both.
weights = [variable.value for variable in model.trainable_variables]
state = [variable.value for variable in optimizer.variables]
hvd.broadcast_variables(weights + state, root_rank=0)


@tf.function
def step(rows, targets):
    """Make one update; return the loss of all ranks."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(rows, training=True) - targets))
    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
    optimizer.apply(tape.gradient(loss, weights), model.trainable_variables)
    return hvd.allreduce(loss)


losses = [float(step(*batch)) for batch in batches.take(40)]
if hvd.rank() == 0:
    print(f"tape_loop: loss {losses[0]:.3f} to {losses[-1]:.4f} on {hvd.size()} ranks")
