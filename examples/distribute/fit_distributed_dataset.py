"""``fit`` and ``evaluate`` on the result of ``experimental_distribute_dataset``."""

import keras
import tensorflow as tf
from common import classifier, dataset, finish


def main(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        model = classifier()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("rmsprop", loss, metrics=["accuracy"])
    batches = strategy.experimental_distribute_dataset(dataset(12))
    history = model.fit(batches, epochs=2, verbose=0)
    scores = model.evaluate(batches, verbose=0)
    finish(w=model.get_weights(), **history.history, scores=scores)


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
