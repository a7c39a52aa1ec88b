"""An embedding, whose gradients are slices of the rows that a replica has looked up."""

import keras
import numpy as np
import tensorflow as tf
from common import FLOAT, finish

BATCH = 8


def main(strategy: tf.distribute.Strategy) -> None:
    draw = np.random.default_rng(1)
    words = draw.integers(0, 30, (40, 5))
    labels = (words.sum(1) % 2).astype(FLOAT)
    with strategy.scope():
        keras.utils.set_random_seed(4)
        table = keras.layers.Embedding(30, 4)
        layers = [table, keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,), dtype="int64"), *layers])
        optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(batch):
        def train(x, y):
            with tf.GradientTape() as tape:
                each = tf.square(model(x, training=True)[:, 0] - y)
                loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        strategy.run(train, args=batch)

    data = tf.data.Dataset.from_tensor_slices((words, labels)).batch(BATCH)
    for batch in strategy.experimental_distribute_dataset(data):
        step(batch)
    finish(w=model.get_weights())


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
