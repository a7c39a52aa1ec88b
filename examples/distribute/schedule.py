"""A learning rate that falls with the steps, and a weight decay."""

import keras
import tensorflow as tf
from common import classifier, dataset, finish, losses

BATCH = 6


def main(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        model = classifier()
        rate = keras.optimizers.schedules.CosineDecay(0.1, decay_steps=20)
        optimizer = keras.optimizers.SGD(rate, momentum=0.9, weight_decay=0.01)
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

    for _ in range(2):
        for batch in strategy.experimental_distribute_dataset(dataset(BATCH)):
            step(batch)
    finish(w=model.get_weights(), rate=float(optimizer.learning_rate))


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
