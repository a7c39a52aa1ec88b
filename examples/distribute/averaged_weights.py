"""The optimizer averages the weights over the steps, and the model takes the average."""

import keras
import tensorflow as tf
from common import classifier, dataset, finish, losses

BATCH = 12


def main(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        model = classifier()
        optimizer = keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.8)
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
    before = model.get_weights()
    with strategy.scope():
        optimizer.finalize_variable_values(model.trainable_variables)
    finish(before=before, w=model.get_weights())


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
