"""A model with its own ``train_step`` and ``test_step``, and two optimizers, in a scope.

It is built by the first batch, counts its steps in a ``tf.Variable``, and continues in a
loop of the program after ``fit``.
"""

import keras
import tensorflow as tf
from common import CLASSES, FLOAT, dataset, finish, losses


class Classifier(keras.Model):
    """A classifier whose two layers have an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(8, "tanh")
        self.outputs = keras.layers.Dense(CLASSES)
        self.hidden_optimizer = keras.optimizers.Adam(0.02)
        self.mean_loss = keras.metrics.Mean(name="loss")
        self.rows = keras.metrics.Sum(name="rows")
        self.steps = tf.Variable(0.0, trainable=False, dtype=FLOAT)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.outputs(self.hidden(x))

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.mean_loss, self.rows]

    def measured(self, labels: tf.Tensor, loss: tf.Tensor) -> dict[str, tf.Tensor]:
        self.mean_loss.update_state(loss)
        self.rows.update_state(tf.ones_like(labels))
        return {metric.name: metric.result() for metric in self.metrics}

    def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        x, labels = data
        with tf.GradientTape(persistent=True) as tape:
            each = losses(labels, self(x, training=True))
            mean, squared = tf.reduce_mean(each), tf.reduce_mean(each**2)
        weights = self.outputs.trainable_variables
        gradients, _ = tf.clip_by_global_norm(tape.gradient(mean, weights), 0.3)
        self.optimizer.apply(gradients, weights)
        weights = self.hidden.trainable_variables
        self.hidden_optimizer.apply(tape.gradient(squared, weights), weights)
        self.steps.assign_add(1.0)
        return self.measured(labels, mean)

    def test_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        x, labels = data
        return self.measured(labels, tf.reduce_mean(losses(labels, self(x))))


def main(strategy: tf.distribute.Strategy) -> None:
    keras.utils.set_random_seed(4)
    with strategy.scope():
        model = Classifier()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    held_out = dataset(10, 25, seed=1)
    history = model.fit(dataset(16), validation_data=held_out, epochs=2, verbose=0)
    scores = model.evaluate(held_out, verbose=0, return_dict=True)
    results = [float(metric.result()) for metric in model.metrics]

    def replica(x: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(
                losses(labels, model(x)), global_batch_size=20
            )
        weights = model.outputs.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)
        model.rows.update_state(tf.ones_like(labels))

    step = tf.function(lambda batch: strategy.run(replica, args=batch))
    for batch in strategy.experimental_distribute_dataset(dataset(20)):
        step(batch)
    rows = float(model.rows.result())
    finish(
        w=model.get_weights(),
        steps=model.steps.numpy(),
        results=[*results, rows],
        **history.history,
        scores=list(scores.values()),
    )


if __name__ == "__main__":
    main(tf.distribute.MirroredStrategy())
