"""The outputs of all replicas for a data set, even if the last batch is short."""

import tensorflow as tf
from common import classifier, finish, rows


def main(strategy: tf.distribute.Strategy) -> None:
    x, _ = rows(37)
    with strategy.scope():
        model = classifier()

    @tf.function
    def predict(batch):
        return strategy.run(lambda part: model(part, training=False), args=(batch,))

    data = tf.data.Dataset.from_tensor_slices(x).batch(8)
    outputs = [
        strategy.gather(predict(batch), axis=0)
        for batch in strategy.experimental_distribute_dataset(data)
    ]
    finish(outputs=tf.concat(outputs, 0))


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
