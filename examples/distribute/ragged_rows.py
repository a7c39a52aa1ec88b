"""Rows of different lengths: ragged batches, divided among the replicas like other batches."""

import keras
import tensorflow as tf
from common import FLOAT, finish

BATCH = 4


def main(strategy: tf.distribute.Strategy) -> None:
    lengths = [1, 4, 2, 3, 5, 1, 2, 2, 6, 3]
    rows = tf.ragged.constant([[n, *range(n - 1)] for n in lengths], dtype=tf.int64)
    with strategy.scope():
        keras.utils.set_random_seed(4)
        table = keras.layers.Embedding(10, 3)
        table.build()
        optimizer = keras.optimizers.Adam(0.05)
        optimizer.build(table.trainable_variables)

    @tf.function
    def step(batch):
        def train(words):
            with tf.GradientTape() as tape:
                vectors = words.with_values(table(words.values))
                each = tf.reduce_sum(tf.reduce_mean(vectors, axis=1) ** 2, axis=-1)
                loss = tf.reduce_sum(each) / tf.constant(BATCH, FLOAT)
            gradients = tape.gradient(loss, table.trainable_variables)
            optimizer.apply_gradients(zip(gradients, table.trainable_variables))
            return loss

        return strategy.reduce("SUM", strategy.run(train, args=(batch,)), axis=None)

    data = tf.data.Dataset.from_tensor_slices(rows).batch(BATCH)
    batches = strategy.experimental_distribute_dataset(data)
    history = [float(step(batch)) for batch in batches]
    finish(loss=history, w=table.get_weights())


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
