"""An elastic training with a hook: rank 0 leaves and another rank joins, or it is killed.

ranks_elastic.py FOLDER [killed]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

from collective import backends
from tests.training.compression import linear
from tests.training.compression.test_hooks import ALL
from tests.training.elastic.ranks_killed import TOLD_AT, ComesAndGoes, steps_done


class Dies(keras.callbacks.Callback):
    """Kills rank 0 while the other rank waits for its gradients."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if steps_done(self.model) == TOLD_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, way: str = "") -> None:
    callback = Dies() if way == "killed" else ComesAndGoes()
    backend = backends.get("native", backends.Options(min_np=1))
    result = linear.train(backend, ALL, callbacks=[callback])
    if backend.rank == 0:
        np.save(Path(folder, "losses.npy"), result.losses)


if __name__ == "__main__":
    main(*sys.argv[1:])
