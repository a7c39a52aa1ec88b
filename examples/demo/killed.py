"""A training of some seconds, during which a rank may be killed (``kill -9``).

killed.py    on one process, or on ranks of collectiverun -np 2 --min-np 1 --keras
"""

import time

import keras
import numpy as np


class LongestStep(keras.callbacks.Callback):
    """Measures the longest step; waits a little, so that a rank can be killed in time."""

    def on_train_begin(self, logs=None):
        self.ended, self.longest, self.steps = None, 0.0, 0

    def on_train_batch_end(self, batch, logs=None):
        now, self.steps = time.monotonic(), self.steps + 1
        if self.ended is not None:
            self.longest = max(self.longest, now - self.ended)
        time.sleep(0.02)
        self.ended = time.monotonic()
        if self.steps == 20:
            print("at step 20", flush=True)


rng = np.random.default_rng(0)
x = rng.normal(size=(203, 12)).astype("float32")
y = (x[:, 0] * x[:, 1] > 0).astype("float32")[:, None]

keras.utils.set_random_seed(1)
layers = [
    keras.Input((12,)),
    keras.layers.Dense(32, activation="relu"),
    keras.layers.BatchNormalization(),
    keras.layers.Dropout(0.2),
    keras.layers.Dense(1),
]
model = keras.Sequential(layers)
loss = keras.losses.BinaryCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01), loss)
seen = LongestStep()
history = model.fit(x, y, batch_size=32, epochs=30, verbose=0, callbacks=[seen])
print(f"longest step: {seen.longest:.2f} s")
print(f"loss: {history.history['loss'][-1]:.9g}")
