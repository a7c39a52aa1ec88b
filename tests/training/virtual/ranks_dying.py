"""A training with virtual replicas whose rank 0 dies in its middle.

    collectiverun -np 3 --min-np 1 python tests/training/virtual/ranks_dying.py

The next rank 0 prints the same as ``ranks_virtual.py native own_step 5 8``.
"""

from __future__ import annotations

import os
import signal

import keras

from collective import backends
from tests.training.virtual.ranks_virtual import said, train


class Dies(keras.callbacks.Callback):
    """Kills only the first rank 0."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch == 3 and os.environ["COLLECTIVE_RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    backend = backends.get("native", backends.Options(threads=1, min_np=1))
    result = train(backend, "own_step", 5, 8, callbacks=[Dies()])
    assert backend.size == 2
    if backend.rank == 0:
        print(said("own_step", result), flush=True)


if __name__ == "__main__":
    main()
