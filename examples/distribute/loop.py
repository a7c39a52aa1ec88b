"""The loop of most guides: ``strategy.run`` on a distributed data set, and a metric."""

import keras
import tensorflow as tf
from common import classifier, dataset, finish, losses

BATCH = 12


def main(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        model = classifier()
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def train(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            each = losses(y, logits)
            loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        accuracy.update_state(y, logits)
        return loss

    @tf.function
    def step(batch):
        parts = strategy.run(train, args=batch)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, parts, axis=None)

    batches = strategy.experimental_distribute_dataset(dataset(BATCH))
    history = []
    for _ in range(2):
        accuracy.reset_state()
        history += [float(step(batch)) for batch in batches]
        history.append(float(accuracy.result()))
    finish(w=model.get_weights(), loss=history)


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
