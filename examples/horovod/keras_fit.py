"""Keras fit with every callback: each rank trains on its part of the data."""

import argparse
import tempfile
from pathlib import Path

import horovod.tensorflow.keras as hvd
import keras
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.01)
options = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())

# Every rank takes its own rows of the same data.
random = np.random.default_rng(0)
x = random.normal(size=(512, 16)).astype("float32")
y = (x @ random.normal(size=(16, 4))).argmax(1)
x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]

model = keras.Sequential(
    [
        keras.Input((16,)),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(4),
    ]
)
rate = options.lr * hvd.size()
model.compile(
    hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9, clipnorm=1.0)),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=1),
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=rate, multiplier=lambda epoch: 0.5**epoch, start_epoch=1
    ),
]
folder = Path(tempfile.mkdtemp())
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(folder / "model.keras"))

history = model.fit(
    x,
    y,
    batch_size=32,
    epochs=options.epochs,
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
)
losses = history.history["loss"]
if hvd.rank() == 0:
    # The loaded model continues its training; loading does not need other ranks.
    keras.models.load_model(folder / "model.keras")
    print(f"keras_fit: loss {losses[0]:.3f} to {losses[-1]:.3f} on {hvd.size()} ranks")
