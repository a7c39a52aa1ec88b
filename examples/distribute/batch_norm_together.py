"""Batch normalization with the statistics of all replicas' rows."""

import keras
import tensorflow as tf
from common import CLASSES, FEATURES, dataset, finish, losses

BATCH = 12


def main(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        keras.utils.set_random_seed(4)
        norm = keras.layers.BatchNormalization(synchronized=True)
        layers = [keras.layers.Dense(8), norm, keras.layers.Dense(CLASSES)]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(batch):
        def train(x, y):
            with tf.GradientTape() as tape:
                each = losses(y, model(x, training=True))
                loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        strategy.run(train, args=batch)

    for batch in strategy.experimental_distribute_dataset(dataset(BATCH)):
        step(batch)
    finish(w=model.get_weights())


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
