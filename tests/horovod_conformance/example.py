"""Runs one of Horovod's examples on one rank: ``example.main()``, its file in sys.argv.

Random numbers of the same shapes replace the data sets that it would download. At its end the
trained weights of all ranks are compared, bit by bit.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

built: list[keras.Model] = []


def load_data(path: str = "") -> tuple:
    """Return digits of random pixels, the same on every rank."""
    del path
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (2000, 28, 28), np.uint8)
    labels = random.integers(0, 10, 2000, np.uint8)
    return (images, labels), (images[:500], labels[:500])


def main() -> None:
    """Run the example; see ``checked``."""
    sys.argv = sys.argv[1:]
    checked(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))


def checked(run: Callable[[], Any]) -> None:
    """Call ``run``; print ``same weights``, or end with exit code 1."""
    init = keras.Model.__init__

    def noted(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        built.append(self)

    keras.Model.__init__ = noted
    word = os.environ["EXAMPLE_WORD"]
    if "EXAMPLE_EVENTS" in os.environ:
        _slow_down(word)
    run()
    hvd = importlib.import_module(f"{word}.tensorflow")
    if not hvd.is_initialized():
        return  # it has started a job, and is not one of its ranks
    # Statistics of batch normalization are each rank's own, as in Horovod. The last of
    # several models of the same size counts: one may be made from another's configuration.
    model = max(reversed(built), key=lambda m: sum(w.size for w in m.get_weights()))
    weights = [w.numpy() for w in model.trainable_variables]
    if not weights or not all(np.isfinite(w).all() for w in weights):
        raise SystemExit("no weights, or not finite")
    digest = hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()
    everyone = hvd.allgather_object(digest)
    if set(everyone) != {digest}:
        raise SystemExit(f"rank {hvd.rank()}: other weights than on other ranks")
    print(f"rank {hvd.rank()} of {hvd.size()}: same weights", flush=True)


def _slow_down(word: str) -> None:
    """Have each commit report this rank, and delay it until no rank joins or leaves."""
    state = importlib.import_module(f"{word}.common.elastic").State
    hvd = importlib.import_module(f"{word}.tensorflow")
    folder = Path(os.environ["EXAMPLE_EVENTS"])
    commit = state.commit

    def slow(self: Any) -> None:
        part = folder / f"{os.getpid()}.part"
        part.write_text(f"{hvd.rank()} {hvd.size()}")
        part.rename(folder / f"{os.getpid()}")
        if not (folder / "done").exists():
            time.sleep(2)
        commit(self)

    state.commit = slow
