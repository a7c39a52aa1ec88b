"""Trains, keeps a checkpoint of model, optimizer and metric, and continues from it."""

import os
import tempfile

import keras
import tensorflow as tf
from common import classifier, dataset, finish, losses

BATCH = 12


def main(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        model = classifier()
        optimizer = keras.optimizers.Adam(0.02)
        optimizer.build(model.trainable_variables)
        seen = tf.Variable(
            0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    @tf.function
    def step(batch):
        def train(x, y):
            with tf.GradientTape() as tape:
                each = losses(y, model(x, training=True))
                loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            seen.assign_add(tf.shape(x)[0])

        strategy.run(train, args=batch)

    batches = strategy.experimental_distribute_dataset(dataset(BATCH))
    for batch in batches:
        step(batch)
    rows = int(seen.numpy())
    state = tf.train.Checkpoint(model=model, optimizer=optimizer)
    path = os.path.join(tempfile.mkdtemp(), "state")
    saved = state.write(path)
    kept = model.get_weights()
    for batch in batches:
        step(batch)
    state.read(saved)
    finish(kept=kept, w=model.get_weights(), rows=rows)


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
