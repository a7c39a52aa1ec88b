"""Functions that the drivers of Ray and Spark call on ranks, and their reports."""

from __future__ import annotations


def sums(base: float) -> tuple[float, int, str]:
    import socket

    import numpy as np

    import collective

    collective.init()
    total = collective.allreduce(
        np.array([base ** collective.rank()]), op=collective.Sum
    )
    return float(total[0]), collective.rank(), socket.gethostname()


def fails() -> None:
    import collective

    collective.init()
    if collective.rank() == 1:
        raise ValueError("of rank 1")


def trains(folder: str, slow: float, epochs: int = 1000) -> list[float]:
    """Train until there is a file ``stop``; return the losses of the epochs.

    Each epoch adds a line to the file ``progress``.
    """
    import time
    from pathlib import Path

    import keras
    import numpy as np

    import collective

    Path(folder).mkdir(exist_ok=True)

    class Progress(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            size = collective.size() if collective.is_initialized() else 1
            with Path(folder, "progress").open("a") as file:
                file.write(f"epoch {epoch} on {size} ranks\n")
            time.sleep(slow)
            self.model.stop_training = Path(folder, "stop").exists()

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4, "softmax")])
    model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy")
    x = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
    y = x[:, :4].argmax(axis=1)
    result = collective.fit(
        model, x, y, batch_size=32, epochs=epochs, verbose=0, callbacks=[Progress()],
        checkpoint=collective.Checkpoint(f"{folder}/checkpoint", resume=True),
    )  # fmt: skip
    return result.history["loss"]


def loses_a_rank(once: str) -> int:
    """Kill rank 1 once; return the sum over the ranks that remain or succeed it."""
    import os
    import signal

    import collective.tensorflow as hvd

    hvd.init()
    state = hvd.elastic.ObjectState(hvd.broadcast_object, batch=0)

    @hvd.elastic.run
    def train(state):
        if hvd.rank() == 1 and not os.path.exists(once):
            open(once, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        total = int(hvd.allreduce(10.0 ** hvd.rank(), op=hvd.Sum))
        state.batch += 1
        state.commit()
        return total

    return train(state)


def report(what: str, call) -> None:
    try:
        print(what, call(), flush=True)
    except Exception as error:
        print(what, type(error).__name__, str(error).replace("\n", " | "), flush=True)
