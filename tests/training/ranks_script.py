"""The script of the README; ``test_fit`` starts it under mpirun."""

import sys
from pathlib import Path

import keras

from collective import training
from collective.training.input import datasets


def make():
    layers = [
        keras.Input((8, 8, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(64, "relu"),
        keras.layers.Dense(10),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


keras.utils.set_random_seed(0)
digits = datasets.load("digits")
result = training.fit(
    make,
    digits.train,
    validation_data=digits.test,
    epochs=3,
    callbacks=[
        keras.callbacks.EarlyStopping(patience=2),
        keras.callbacks.ModelCheckpoint(str(Path(sys.argv[1], "model.keras"))),
    ],
)
assert result.history["val_accuracy"][-1] > 0.5  # guessing gives 0.1
if result.backend.rank == 0:
    print(f"trained by {result.backend.name} on {result.backend.replicas} replicas")
