"""A subclassed model with layers of its own, built when it first sees data."""

import sys

import keras
import numpy as np
from keras import layers, ops


@keras.saving.register_keras_serializable("examples")
class Highway(layers.Layer):
    """Mixes its input with a transformed one, by a gate that it learns."""

    def build(self, input_shape):
        width = input_shape[-1]
        self.kernel = self.add_weight((width, width), "glorot_uniform", name="kernel")
        self.gate = self.add_weight((width, width), "glorot_uniform", name="gate")
        self.bias = self.add_weight((width,), "zeros", name="bias")

    def call(self, inputs):
        gate = ops.sigmoid(ops.matmul(inputs, self.gate) + self.bias)
        return gate * ops.tanh(ops.matmul(inputs, self.kernel)) + (1 - gate) * inputs


@keras.saving.register_keras_serializable("examples")
class Network(keras.Model):
    """A dense layer, some highways, and one number for each row."""

    def __init__(self, width=20, depth=3, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dense(width, activation="relu")
        self.highways = [Highway() for _ in range(depth)]
        self.normalize = layers.LayerNormalization()
        self.last = layers.Dense(1)

    def call(self, inputs, training=False):
        x = self.first(inputs)
        for highway in self.highways:
            x = highway(x)
        if training:
            self.add_loss(1e-3 * ops.mean(ops.square(x)))
        return self.last(self.normalize(x))


def main():
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, size=(517, 5)).astype("float32")
    y = np.sin(x[:, :1]) * x[:, 1:2] + 0.3 * x[:, 2:3] ** 2

    model = Network()
    model.compile(
        keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True), "mse", metrics=["mae"]
    )
    history = model.fit(x, y, batch_size=40, epochs=4, shuffle=False, verbose=0)
    for name, values in history.history.items():
        print(f"{name}: {' '.join(f'{value:.9g}' for value in values)}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
