"""Programs for the ranks of tests/backends/test_parameter_server.py."""

from __future__ import annotations

import os
import signal
import sys
import time

import keras
import numpy as np
import psutil
import tensorflow as tf

from collective import backends
from tests.training import small

WIDE = 270  # a kernel of two shards, in float64


def settings(case: str) -> dict:
    """Return the arguments of ``small.train``, by the name of a case."""
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(WIDE, "tanh"), keras.layers.Dense(WIDE, "tanh")]
    optimizer = {
        "adamw-ema": small.adamw,
        "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
        "global-clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    }[case]
    return {"model": small.model(optimizer, *layers), "epochs": 2}


CASES = ("adamw-ema", "clipnorm", "global-clipnorm")


def results(backend, case: str) -> list[np.ndarray]:
    """Return the losses, the exact validation and the weights."""
    keras.config.set_floatx("float64")
    result = small.train(backend, validate=True, **settings(case))
    validated = [result.history[name] for name in ("val_loss", "val_accuracy")]
    weights = [np.asarray(v) for v in result.model.trainable_variables]
    return [np.array(result.losses), *map(np.array, validated), *weights]


def equal(folder: str) -> None:
    """Compare with one process: one worker gets the batches in order."""
    backend = backends.get("tf-parameter-server", backends.Options(parameter_servers=2))
    backend.serve()
    for case in CASES:
        np.savez(f"{folder}/{case}.npz", *results(backend, case))


class Kill(keras.callbacks.Callback):
    """Kills the server of a rank at the end of the first epoch."""

    def __init__(self, rank: int):
        super().__init__()
        self.rank = str(rank)

    def on_epoch_end(self, epoch, logs=None):
        for process in psutil.Process().parent().children():
            if epoch == 0 and process.environ()["OMPI_COMM_WORLD_RANK"] == self.rank:
                (server,) = process.children()
                os.kill(server.pid, signal.SIGKILL)


def at_work(backend) -> set[str]:
    """Return the processes that do the tasks of workers, once all have done one."""
    stat = tf.function(lambda path: tf.strings.split(tf.io.read_file(path))[0])
    found: set[str] = set()
    deadline = time.monotonic() + 60
    while len(found) < backend.workers and time.monotonic() < deadline:
        given = [
            backend.coordinator.schedule(stat, (tf.constant("/proc/self/stat"),))
            for _ in range(20)
        ]
        found |= {value.fetch().decode() for value in given}
    return found


def killed() -> None:
    """Count steps rightly, continue after the loss of a worker, end with a server."""
    backend = backends.get("tf-parameter-server")
    result = small.train(backend, epochs=20)
    counted = int(result.model.optimizer.iterations)
    assert counted == len(result.losses) == 20 * small.PER_EPOCH, counted
    before = at_work(backend)
    result = small.train(backend, [Kill(1)], epochs=2)
    assert len(result.losses) == 2 * small.PER_EPOCH
    assert np.isfinite(result.losses).all()
    print("went on without worker 0", flush=True)
    after = at_work(backend)
    assert len(before) == len(after) == 2 and len(before & after) == 1
    print("worker 0 is back at work", flush=True)
    small.train(backend, [Kill(3)], epochs=30)
    print("went on without a server", flush=True)


if __name__ == "__main__":
    equal(sys.argv[1]) if len(sys.argv) > 1 else killed()
