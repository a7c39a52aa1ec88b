"""Keras' ``fit`` and ``predict`` on arrays, in a strategy's scope."""

import keras
import tensorflow as tf
from common import classifier, finish, rows


def main(strategy: tf.distribute.Strategy) -> None:
    x, y = rows()
    with strategy.scope():
        model = classifier()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    outputs = model.predict(x, batch_size=16, verbose=0)
    finish(w=model.get_weights(), **history.history, outputs=outputs)


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
