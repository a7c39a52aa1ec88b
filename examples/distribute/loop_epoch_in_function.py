"""A whole epoch in one ``tf.function``, which iterates over the distributed data set."""

import keras
import tensorflow as tf
from common import FLOAT, classifier, dataset, finish, losses

BATCH = 8


def main(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        model = classifier()
        optimizer = keras.optimizers.SGD(0.05, nesterov=True, momentum=0.8)
        optimizer.build(model.trainable_variables)

    def train(x, y):
        with tf.GradientTape() as tape:
            each = losses(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    @tf.function
    def epoch(batches):
        total, steps = tf.zeros([], FLOAT), tf.zeros([], FLOAT)
        for batch in batches:
            parts = strategy.run(train, args=batch)
            total += strategy.reduce(tf.distribute.ReduceOp.SUM, parts, axis=None)
            steps += 1.0
        return total / steps

    batches = strategy.experimental_distribute_dataset(dataset(BATCH))
    history = [float(epoch(batches)) for _ in range(3)]
    finish(w=model.get_weights(), loss=history)


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
