"""A compute_loss of the user's own: a penalty on the slope of the prediction."""

import sys

import keras
import numpy as np
from keras import layers, ops


@keras.saving.register_keras_serializable("examples")
class Smooth(keras.Model):
    """Learns a prediction that changes little between neighbouring rows."""

    def __init__(self, strength=0.5, **kwargs):
        super().__init__(**kwargs)
        self.strength = strength
        self.hidden = layers.Dense(24, activation="tanh")
        self.out = layers.Dense(1)
        self.penalty = keras.metrics.Mean(name="penalty")

    def call(self, inputs):
        return self.out(self.hidden(inputs))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        loss = super().compute_loss(x=x, y=y, y_pred=y_pred)
        slope = (self(x + 0.1) - y_pred) / 0.1
        penalty = ops.mean(ops.square(slope))
        self.penalty.update_state(penalty, sample_weight=ops.shape(x)[0])
        return loss + self.strength * penalty


def main():
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(407, 3)).astype("float32")
    y = np.sign(x[:, :1] + x[:, 1:2] * x[:, 2:]).astype("float32")

    model = Smooth()
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    history = model.fit(
        x[:350],
        y[:350],
        batch_size=32,
        epochs=4,
        shuffle=False,
        validation_data=(x[350:], y[350:]),
        verbose=2,
    )
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
