"""A loss that is scaled up before its gradient and down after it."""

import keras
import tensorflow as tf
from common import classifier, dataset, finish, losses

BATCH = 12


def main(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        model = classifier()
        inner = keras.optimizers.Adam(0.01)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(batch):
        def train(x, y):
            with tf.GradientTape() as tape:
                each = losses(y, model(x, training=True))
                loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
                scaled = optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        strategy.run(train, args=batch)

    for batch in strategy.experimental_distribute_dataset(dataset(BATCH)):
        step(batch)
    finish(
        w=model.get_weights(), scale=keras.ops.convert_to_numpy(optimizer.dynamic_scale)
    )


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
