"""Several steps in each call: an iterator and ``tf.range`` in the function."""

import keras
import tensorflow as tf
from common import classifier, dataset, finish, losses

BATCH = 6


def main(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        model = classifier()
        optimizer = keras.optimizers.Adam(0.02)
        optimizer.build(model.trainable_variables)
        mean = keras.metrics.Mean()

    @tf.function
    def train_steps(iterator, steps):
        def train(x, y):
            with tf.GradientTape() as tape:
                each = losses(y, model(x, training=True))
                loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            mean.update_state(each)

        for _ in tf.range(steps):
            strategy.run(train, args=next(iterator))

    batches = strategy.experimental_distribute_dataset(dataset(BATCH).repeat())
    iterator, history = iter(batches), []
    for _ in range(3):
        train_steps(iterator, tf.constant(5))
        history.append(float(mean.result()))
        mean.reset_state()
    finish(w=model.get_weights(), loss=history, steps=optimizer.iterations.numpy())


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
