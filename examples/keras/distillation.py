"""Distillation: a small model learns from a large one by its own train_step."""

import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

ROWS, FEATURES, CLASSES, TEMPERATURE = 419, 10, 5, 3.0


class Distiller(keras.Model):
    """Trains ``student`` on the labels and on the predictions of ``teacher``."""

    def __init__(self, student, teacher, alpha=0.3):
        super().__init__()
        self.student = student
        self.teacher = teacher
        self.teacher.trainable = False
        self.alpha = alpha
        self.distance = keras.losses.KLDivergence()
        self.soft_loss = keras.metrics.Mean(name="soft_loss")

    def call(self, inputs, training=None):
        return self.student(inputs, training=training)

    def train_step(self, data):
        x, y = data
        soft = ops.softmax(self.teacher(x, training=False) / TEMPERATURE)
        with tf.GradientTape() as tape:
            logits = self.student(x, training=True)
            hard_loss = self.compute_loss(x=x, y=y, y_pred=logits)
            soft_loss = self.distance(soft, ops.softmax(logits / TEMPERATURE))
            loss = self.alpha * hard_loss + (1 - self.alpha) * soft_loss
        gradients = tape.gradient(loss, self.student.trainable_variables)
        self.optimizer.apply(gradients, self.student.trainable_variables)

        self.soft_loss.update_state(soft_loss, sample_weight=ops.shape(y)[0])
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=ops.shape(y)[0])
            elif metric.name != "soft_loss":
                metric.update_state(y, logits)
        return self.get_metrics_result()


def classifier(width):
    """Return a model with one hidden layer."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(width, activation="relu"),
            layers.Dense(CLASSES),
        ]
    )


def main():
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, FEATURES)).astype("float32")
    y = (np.abs(x) @ rng.normal(size=(FEATURES, CLASSES))).argmax(axis=1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    teacher = classifier(64)
    teacher.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    taught = teacher.fit(x, y, batch_size=32, epochs=4, shuffle=False, verbose=0)
    print(f"teacher_accuracy: {taught.history['accuracy'][-1]:.9g}")

    distiller = Distiller(classifier(12), teacher)
    distiller.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    history = distiller.fit(x, y, batch_size=32, epochs=3, shuffle=False, verbose=2)
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    test = distiller.evaluate(x[:101], y[:101], verbose=0, return_dict=True)
    print(f"test_accuracy: {test['accuracy']:.9g}")
    if len(sys.argv) > 1:
        distiller.student.save(sys.argv[1])
    return distiller


if __name__ == "__main__":
    main()
