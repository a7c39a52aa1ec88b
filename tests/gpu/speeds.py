"""Images per second of a way to train on one device or several; ``speeds.py HOW``.

    mirrored N       stock MirroredStrategy on N devices
    multiworker      stock MultiWorkerMirroredStrategy: a process for each device (TF_CONFIG)
    ours BACKEND     collective.fit; the launcher, or the backend, determines the number
    nccl BACKEND     only the sum of the model's gradients, milliseconds

With GPUs it trains ResNet-50 with 64 rows a device; else a small model that shows that it
runs. It prints ``images/s: NUMBER``.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np

WARM, STEPS = 5, 15


def data(count: int, is_gpu: bool) -> tuple[str, np.ndarray, np.ndarray]:
    name, shape, rows = (
        ("resnet50", (64, 64, 3), 64) if is_gpu else ("cnn", (28, 28, 1), 8)
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count * rows, *shape)).astype("float32")
    return name, x, rng.integers(0, 10, len(x)).astype("int32")


def by_strategy(strategy: Any, is_gpu: bool) -> None:
    """Train by stock TensorFlow: a loop with ``strategy.run``; NCCL sums the gradients."""
    import keras
    import tensorflow as tf

    from collective.training.calls import models

    count = strategy.num_replicas_in_sync
    name, x, y = data(1, is_gpu)
    with strategy.scope():
        model = models.build(name, input_shape=x.shape[1:], classes=10)
        optimizer = keras.optimizers.SGD(1e-3)
        optimizer.build(model.trainable_variables)

    def replica() -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            loss = tf.reduce_mean(losses) / count
        weights = model.trainable_variables
        gradients = tape.gradient(loss, weights)
        total = tf.distribute.get_replica_context().all_reduce("sum", gradients)
        optimizer.apply(total, weights)
        return loss

    step = tf.function(lambda: strategy.run(replica))

    def run() -> None:
        np.asarray(strategy.experimental_local_results(step())[0])

    report(run, count * len(x))


def report(run: Any, rows: int) -> None:
    for _ in range(WARM):
        run()
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    print(f"images/s: {rows / statistics.median(times):.1f}", flush=True)


def ours(backend: Any, is_gpu: bool) -> None:
    import keras

    import collective
    from collective.training.calls import models

    name, x, y = data(backend.replicas, is_gpu)
    with backend.scope():
        model = models.build(name, input_shape=x.shape[1:], classes=10)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1e-3), loss)
    rows, times = len(x), []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            times.append(time.perf_counter() - self.began)

    collective.fit(
        model,
        np.tile(x, (WARM + STEPS, 1, 1, 1)),
        np.tile(y, WARM + STEPS),
        batch_size=rows,
        backend=backend,
        callbacks=[Clock()],
        verbose=0,
    )
    if backend.rank == 0:
        print(f"images/s: {rows / statistics.median(times[WARM:]):.1f}", flush=True)


def nccl(backend: Any, is_gpu: bool) -> None:
    import tensorflow as tf

    from collective.training.calls import models

    name, x, _ = data(1, is_gpu)
    model = models.build(name, input_shape=x.shape[1:], classes=10)
    shapes = [w.shape for w in model.trainable_variables]
    step = tf.function(
        lambda: backend.run(
            lambda: backend.all_reduce([tf.ones(shape) for shape in shapes])[0], ()
        )
    )
    times = []
    for _ in range(WARM + STEPS):
        began = time.perf_counter()
        np.asarray(tf.nest.flatten(step())[0])
        times.append(1e3 * (time.perf_counter() - began))
    if backend.rank == 0:
        print(f"milliseconds: {statistics.median(times[WARM:]):.2f}", flush=True)


def main(how: str, *more: str) -> None:
    if how in ("ours", "nccl"):
        from collective import backends

        name, _, devices = more[0].partition(":")
        options = backends.Options(devices=int(devices) if devices else None)
        backend = backends.get(name, options)
        import tensorflow as tf

        is_gpu = bool(tf.config.list_physical_devices("GPU"))
        {"ours": ours, "nccl": nccl}[how](backend, is_gpu)
        return
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if how == "mirrored":
        if not gpus:
            cpu = tf.config.list_physical_devices("CPU")[0]
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * int(more[0])
            )
        kind = "gpu" if gpus else "cpu"
        names = [f"/{kind}:{i}" for i in range(int(more[0]))]
        by_strategy(tf.distribute.MirroredStrategy(names), bool(gpus))
        return
    implementation = tf.distribute.experimental.CommunicationImplementation
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(
            implementation=implementation.NCCL if gpus else implementation.RING
        )
    )
    by_strategy(strategy, bool(gpus))


if __name__ == "__main__":
    main(*sys.argv[1:])
