"""Gradients of several batches are summed before they are applied."""

import keras
import tensorflow as tf
from common import classifier, dataset, finish, losses

BATCH, PARTS = 6, 2


def main(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        model = classifier()
        optimizer = keras.optimizers.Adam(0.02)
        optimizer.build(model.trainable_variables)
        sums = [
            tf.Variable(
                tf.zeros_like(v.value),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            for v in model.trainable_variables
        ]

    @tf.function
    def add(batch):
        def replica(x, y):
            with tf.GradientTape() as tape:
                each = losses(y, model(x, training=True))
                rows = PARTS * BATCH
                loss = tf.nn.compute_average_loss(each, global_batch_size=rows)
            for total, part in zip(
                sums, tape.gradient(loss, model.trainable_variables)
            ):
                total.assign_add(part)

        strategy.run(replica, args=batch)

    @tf.function
    def apply():
        def replica():
            gradients = [tf.identity(total) for total in sums]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            for total in sums:
                total.assign(tf.zeros_like(total))

        strategy.run(replica)

    batches = strategy.experimental_distribute_dataset(dataset(BATCH))
    for number, batch in enumerate(batches):
        add(batch)
        if number % PARTS == PARTS - 1:
            apply()
    finish(w=model.get_weights())


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
