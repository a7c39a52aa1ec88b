"""A training whose hosts change in its middle; run by ``test_growing``.

    ranks_renewed.py BACKEND[:arrays] FOLDER HOSTS...

In each generation, after some steps, rank 0 has the discovery script print the next of HOSTS,
such as ``node1:1,node2:1``. ``kill``: rank 0 kills itself, and the other rank waits for its
replacement; ``leave``: the same with SIGTERM. ``cut``: it waits for the test to cut off a host.
With ``:arrays``, Keras' own ``fit`` reads the rows, and there are no checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras

import collective
from collective import backends
from collective.elastic import generations
from collective.training import Checkpoint
from collective.training.loop.result import Result
from tests.training.small import BATCH, everything, rows, train

CHANGES_AT = (5, 12)  # the second is at the end of an epoch
KILLED_AT, STEPS = 5, 20


def announce(folder: Path, hosts: str) -> None:
    part = folder / "hosts.part"
    part.write_text(hosts.replace(",", "\n"))
    part.rename(folder / "hosts")


class Changes(keras.callbacks.Callback):
    def __init__(self, backend: backends.Backend, folder: Path, hosts: list[str]):
        super().__init__()
        self.backend, self.folder, self.hosts = backend, folder, hosts

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        done, number = int(self.model.optimizer.iterations), generations.number()
        if self.hosts in (["kill"], ["leave"]):
            if done == KILLED_AT and self.backend.size > 1 and not number:
                kills = self.hosts == ["kill"]
                os.kill(os.getpid(), signal.SIGKILL if kills else signal.SIGTERM)
            waits = done == KILLED_AT + 2 and self.backend.size == 1
        elif self.hosts == ["cut"]:
            if number == 0 and done == KILLED_AT:
                (self.folder / "cut").touch()
                time.sleep(1000)
            waits = False
        else:
            waits = number < len(CHANGES_AT) and done == CHANGES_AT[number]
            if waits:
                announce(self.folder, self.hosts[number])
        while waits and not generations.restart_requested():
            time.sleep(0.01)


def main(name: str, folder: str, *hosts: str) -> None:
    keras.config.set_floatx("float64")
    name, *of_arrays = name.split(":")
    backend = backends.get(name, backends.Options(min_np=1))
    changes = Changes(backend, Path(folder), list(hosts))
    if not of_arrays:
        train_and_note(backend, Path(folder), changes)
        return
    note(train_on_arrays(backend, changes), Path(folder))


def train_on_arrays(backend: backends.Backend, *callbacks: Any) -> Result:
    x, y = rows()
    words = {"batch_size": BATCH, "epochs": 4, "steps": STEPS, "seed": 5, "verbose": 0}
    return collective.fit(
        everything(), x, y, backend=backend, callbacks=list(callbacks), **words
    )


def train_and_note(backend, folder: Path, callback: keras.callbacks.Callback) -> None:
    """Train with checkpoints and a ledger; rank 0 writes the result."""
    result = train(
        backend,
        steps=STEPS,
        model=everything(),
        data=rows(),
        callbacks=[callback],
        checkpoint=Checkpoint(folder / "runs", every=2),
        ledger=folder / "ledger",
    )
    note(result, folder)


def note(result: Result, folder: Path) -> None:
    """Write the result on rank 0."""
    if result.backend.rank == 0:
        results = {"losses": result.losses, "size": result.backend.size}
        (folder / "result.json").write_text(json.dumps(results))
    result.backend.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
