"""Elastic state: committed values can be restored, and are the same on every rank."""

import horovod.tensorflow.keras as hvd
import keras
import numpy as np

hvd.init()
keras.utils.set_random_seed(hvd.rank())

random = np.random.default_rng(hvd.rank())
x = random.normal(size=(64, 4)).astype("float32")
y = x.sum(1, keepdims=True)

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
losses = []


@hvd.elastic.run
def train(state):
    """Continue from the state, which every rank now has."""
    history = model.fit(
        x,
        y,
        batch_size=16,
        epochs=3 - state.epoch,
        verbose=0,
        callbacks=[
            hvd.callbacks.MetricAverageCallback(),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
        ],
    )
    losses.extend(history.history["loss"])


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
train(state)
if hvd.rank() == 0:
    print(
        f"elastic_fit: {state.epoch} epochs, loss {losses[0]:.3f} to {losses[-1]:.3f}"
    )
