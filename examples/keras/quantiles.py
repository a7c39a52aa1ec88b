"""Quantile regression: a loss class of the user's own for each of three outputs."""

import sys

import keras
import numpy as np
from keras import layers, ops


@keras.saving.register_keras_serializable("examples")
class Pinball(keras.losses.Loss):
    """Costs ``quantile`` for a low prediction, and the rest to 1 for a high one."""

    def __init__(self, quantile, name="pinball", **kwargs):
        super().__init__(name=name, **kwargs)
        self.quantile = quantile

    def call(self, y_true, y_pred):
        error = y_true - y_pred
        return ops.maximum(self.quantile * error, (self.quantile - 1) * error)

    def get_config(self):
        return {**super().get_config(), "quantile": self.quantile}


def below(y_true, y_pred):
    """Return how many targets are below the prediction."""
    return ops.cast(y_true < y_pred, "float32")


def main():
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 3, size=(451, 1)).astype("float32")
    y = (np.sin(2 * x) + (0.1 + 0.2 * x) * rng.normal(size=x.shape)).astype("float32")

    inputs = keras.Input((1,))
    hidden = layers.Dense(32, activation="elu")(inputs)
    hidden = layers.Dense(32, activation="elu")(hidden)
    names = {"low": 0.1, "median": 0.5, "high": 0.9}
    outputs = {name: layers.Dense(1, name=name)(hidden) for name in names}
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adamax(0.01),
        loss={name: Pinball(quantile) for name, quantile in names.items()},
        metrics={name: [below] for name in names},
    )
    history = model.fit(
        x,
        dict.fromkeys(names, y),
        batch_size=55,
        epochs=5,
        shuffle=False,
        verbose=0,
    )
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    band = model.predict(np.array([[0.5], [2.5]]), verbose=0)
    for name in names:
        print(f"at_{name}: {' '.join(f'{value:.9g}' for value in band[name][:, 0])}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
