"""Two models that train against each other, each with an optimizer."""

import keras
import numpy as np
import tensorflow as tf
from common import FEATURES, FLOAT, finish, rows

BATCH = 12


def main(strategy: tf.distribute.Strategy) -> None:
    real, _ = rows()
    noise = np.random.default_rng(5).normal(size=(len(real), 3)).astype(FLOAT)
    with strategy.scope():
        keras.utils.set_random_seed(4)
        maker = keras.Sequential([keras.Input((3,)), keras.layers.Dense(FEATURES)])
        judge = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
        first, second = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05)
        first.build(maker.trainable_variables)
        second.build(judge.trainable_variables)

    def mean(values):
        return tf.nn.compute_average_loss(values[:, 0], global_batch_size=BATCH)

    @tf.function
    def step(batch):
        def train(x, z):
            with tf.GradientTape(persistent=True) as tape:
                made = judge(maker(z, training=True), training=True)
                loss = mean(tf.nn.softplus(-made))
                doubt = mean(tf.nn.softplus(made) + tf.nn.softplus(-judge(x)))
            for optimizer, model, value in (
                (first, maker, loss),
                (second, judge, doubt),
            ):
                gradients = tape.gradient(value, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        strategy.run(train, args=batch)

    data = tf.data.Dataset.from_tensor_slices((real, noise)).batch(BATCH)
    for batch in strategy.experimental_distribute_dataset(data):
        step(batch)
    finish(maker=maker.get_weights(), judge=judge.get_weights())


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
