"""Each worker reads its own shard: ``distribute_datasets_from_function``."""

import keras
import tensorflow as tf
from common import classifier, finish, losses, rows

BATCH = 12  # 1, 2 and 3 workers divide it, so that each step has the same rows


def main(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        model = classifier()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
        mean = keras.metrics.Mean()

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices(rows())
        data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.batch(context.get_per_replica_batch_size(BATCH))

    @tf.function
    def step(batch):
        def train(x, y):
            with tf.GradientTape() as tape:
                each = losses(y, model(x, training=True))
                loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            mean.update_state(each)

        strategy.run(train, args=batch)

    for _ in range(2):
        for batch in strategy.distribute_datasets_from_function(make):
            step(batch)
    finish(w=model.get_weights(), loss=float(mean.result()))


if __name__ == "__main__":
    main(tf.distribute.MultiWorkerMirroredStrategy())
