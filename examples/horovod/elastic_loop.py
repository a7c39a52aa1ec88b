"""Elastic state of a custom loop: variables and objects, committed and synced."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()

random = np.random.default_rng(hvd.rank())
x = random.normal(size=(320, 4)).astype("float32")
y = x.sum(1, keepdims=True)
# The values of rank 0 count.
weights = tf.Variable(random.normal(size=(4, 1)).astype("float32"))
losses = []


@tf.function
def step(rows, targets):
    """Make one update; return the loss of all ranks."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(rows @ weights - targets))
    tape = hvd.DistributedGradientTape(tape)
    (gradient,) = tape.gradient(loss, [weights])
    weights.assign_sub(0.05 * gradient)
    return hvd.allreduce(loss)


@hvd.elastic.run
def train(state):
    """Continue from the state, which every rank now has."""
    while state.batch < 20:
        rows = slice(16 * state.batch, 16 * state.batch + 16)
        losses.append(float(step(tf.constant(x[rows]), tf.constant(y[rows]))))
        state.batch += 1
        if state.batch % 5 == 0:
            state.commit()


state = hvd.elastic.TensorFlowState(variables=[weights], batch=0)
train(state)
state.batch = 0
state.restore()
if hvd.rank() == 0:
    print(f"elastic_loop: {state.batch} steps, {losses[0]:.3f} to {losses[-1]:.3f}")
