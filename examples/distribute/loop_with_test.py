"""Training and test steps, each with metrics: a mean, an accuracy, an AUC."""

import keras
import tensorflow as tf
from common import FEATURES, FLOAT, dataset, finish

BATCH = 10


def main(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        keras.utils.set_random_seed(4)
        output = keras.layers.Dense(1, "sigmoid")
        model = keras.Sequential([keras.Input((FEATURES,)), output])
        optimizer = keras.optimizers.Adagrad(0.1)
        optimizer.build(model.trainable_variables)
        train_loss, test_loss = keras.metrics.Mean(), keras.metrics.Mean()
        area = keras.metrics.AUC(num_thresholds=20)
        right = keras.metrics.BinaryAccuracy()

    def errors(y, p):
        return keras.losses.binary_crossentropy(y, p)

    @tf.function
    def train(batch):
        def replica(x, y):
            y = tf.cast(y[:, None] == 0, FLOAT)
            with tf.GradientTape() as tape:
                each = errors(y, model(x, training=True))
                loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            train_loss.update_state(each)

        strategy.run(replica, args=batch)

    @tf.function
    def test(batch):
        def replica(x, y):
            y = tf.cast(y[:, None] == 0, FLOAT)
            p = model(x, training=False)
            test_loss.update_state(errors(y, p))
            area.update_state(y, p)
            right.update_state(y, p)

        strategy.run(replica, args=batch)

    batches = strategy.experimental_distribute_dataset(dataset(BATCH))
    held_out = strategy.experimental_distribute_dataset(dataset(8, 21, seed=3))
    history = []
    for _ in range(2):
        for batch in batches:
            train(batch)
        for batch in held_out:
            test(batch)
        metrics = (train_loss, test_loss, area, right)
        history += [float(metric.result()) for metric in metrics]
        for metric in metrics:
            metric.reset_state()
    finish(w=model.get_weights(), metrics=history)


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
