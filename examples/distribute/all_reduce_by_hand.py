"""Sums gradients itself, clips the sums, and updates without an optimizer."""

import tensorflow as tf
from common import classifier, dataset, finish, losses

BATCH = 10


def main(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        model = classifier()

    @tf.function
    def step(batch):
        def train(x, y):
            variables = [v.value for v in model.trainable_variables]
            with tf.GradientTape() as tape:
                each = losses(y, model(x, training=True))
                loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
            context = tf.distribute.get_replica_context()
            sums = context.all_reduce("SUM", tape.gradient(loss, variables))
            clipped, norm = tf.clip_by_global_norm(sums, 0.3)
            for variable, gradient in zip(variables, clipped):
                variable.assign_sub(0.5 * gradient)
            return norm

        norms = strategy.run(train, args=batch)
        return strategy.reduce("MEAN", norms, axis=None)

    batches = strategy.experimental_distribute_dataset(dataset(BATCH))
    norms = [float(step(batch)) for batch in batches]
    finish(w=model.get_weights(), norms=norms)


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
