"""Rows with weights, and a penalty that is divided by the number of replicas."""

import keras
import numpy as np
import tensorflow as tf
from common import FLOAT, classifier, finish, losses, rows

BATCH = 12


def main(strategy: tf.distribute.Strategy) -> None:
    x, y = rows()
    weights = np.random.default_rng(2).uniform(0.5, 2, len(x)).astype(FLOAT)
    with strategy.scope():
        model = classifier()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(batch):
        def train(x, y, weight):
            with tf.GradientTape() as tape:
                each = losses(y, model(x, training=True))
                loss = tf.nn.compute_average_loss(each, weight, global_batch_size=BATCH)
                penalty = tf.nn.l2_loss(model.trainable_variables[0].value)
                loss += tf.nn.scale_regularization_loss(0.01 * penalty)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        return strategy.reduce("SUM", strategy.run(train, args=batch), axis=None)

    data = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(BATCH)
    batches = strategy.experimental_distribute_dataset(data)
    finish(loss=[float(step(batch)) for batch in batches], w=model.get_weights())


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
