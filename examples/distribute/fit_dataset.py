"""``fit`` on a data set whose batches have an odd number of rows, and validation."""

import keras
import tensorflow as tf
from common import classifier, dataset, finish


def main(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        model = classifier()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    held_out = dataset(10, 25, seed=1)
    history = model.fit(dataset(7), validation_data=held_out, epochs=2, verbose=0)
    finish(w=model.get_weights(), **history.history)


if __name__ == "__main__":
    main(tf.distribute.MultiWorkerMirroredStrategy())
