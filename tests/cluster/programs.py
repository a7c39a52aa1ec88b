"""Programs for ranks of these tests: ``python -m tests.cluster.programs NAME``."""

from __future__ import annotations

import os
import socket
import sys
import time


def sums() -> None:
    """Print the sum over ranks, each of which has a different power of ten."""
    import numpy as np

    import collective

    collective.init()
    total = collective.allreduce(
        np.array([10.0 ** collective.rank()]), op=collective.Sum
    )
    place = f"{collective.rank()} of {collective.size()} on {socket.gethostname()}"
    print(
        f"rank {place}: {total[0]:g}, job {os.environ.get('SLURM_JOB_ID')}", flush=True
    )


def waits() -> None:
    """Train for ever."""
    import numpy as np

    import collective

    collective.init()
    while True:
        collective.allreduce(np.zeros(1), op=collective.Sum)
        if collective.rank() == 0:
            print("at work", flush=True)
        time.sleep(0.2)


def trains() -> None:
    """Print the losses of a small training, with the named backend."""
    import keras
    import numpy as np

    import collective

    def make_model() -> keras.Model:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4, "softmax")])
        model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy")
        return model

    x = np.random.default_rng(0).normal(size=(256, 16)).astype("float32")
    result = collective.fit(
        make_model, x, x[:, :4].argmax(axis=1), batch_size=32, epochs=2, verbose=0,
        backend=sys.argv[2],
    )  # fmt: skip
    losses = " ".join(f"{loss:.5f}" for loss in result.history["loss"])
    print(f"losses {losses}", flush=True)


def elastic() -> None:
    """Count batches on all present ranks, until a file exists."""
    import tensorflow as tf

    import collective.tensorflow as hvd

    hvd.init()
    state = hvd.elastic.TensorFlowState([tf.Variable(0.0)], batch=0)

    @hvd.elastic.run
    def train(state):
        ended = 0.0
        while not ended:
            found = float(hvd.rank() == 0 and os.path.exists(sys.argv[2]))
            ended = float(hvd.allreduce(found, op=hvd.Sum))
            if hvd.rank() == 0:
                print(f"batch {state.batch} on {hvd.size()} ranks", flush=True)
            state.batch += 1
            state.commit()
            time.sleep(0.2)

    train(state)


if __name__ == "__main__":
    {"sums": sums, "waits": waits, "trains": trains, "elastic": elastic}[sys.argv[1]]()
