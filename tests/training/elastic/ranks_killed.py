"""A training that is killed in its middle, or continues; run by ``test_killing``.

    ranks_killed.py BACKEND FOLDER STEPS WAY

WAY is ``killed``: it trains once undisturbed, then again with checkpoints, and rank 0 kills
itself after step 13, which ends the others, too; or ``resumed``: it continues from there; or
``survived``: it trains once undisturbed, then the current rank 0 kills itself, twice, and the
last rank continues; or ``grown``: it trains once undisturbed, then rank 0 is asked to leave,
and another rank joins.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

from collective import backends, session
from collective.training import Checkpoint
from tests.training.small import everything, rows, train

KILLED_AT = 13
SURVIVED_AT = (8, 18)  # including the last step of an epoch
TOLD_AT, JOINED_AT = 5, 11  # the second is at the end of an epoch


def steps_done(model: keras.Model) -> int:
    """Return the steps, also in a form of tf.distribute that ``int`` cannot read."""
    return int(np.array(model.optimizer.iterations))


class Dies(keras.callbacks.Callback):
    """Kills rank 0 in the middle of an epoch, as soon as a checkpoint exists."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if steps_done(self.model) == KILLED_AT:
            while not list(self.folder.glob("step-*")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


class Leaves(keras.callbacks.Callback):
    """Kills rank 0, and then the next one."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if steps_done(self.model) in SURVIVED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


class ComesAndGoes(keras.callbacks.Callback):
    """Asks rank 0 to leave; then holds its successor until a new rank waits."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        done = steps_done(self.model)
        if done == TOLD_AT:
            os.kill(os.getpid(), signal.SIGTERM)
        while done == JOINED_AT and not session.waiting():
            time.sleep(0.01)


def main(name: str, folder: str, steps: str, way: str) -> None:
    keras.config.set_floatx("float64")
    least = backends.Options(min_np=1 if way in ("survived", "grown") else None)
    backend = backends.get(name, least)
    settings = {"steps": int(steps), "model": everything(), "data": rows()}
    runs = Path(folder, "runs")
    if way != "resumed" and not backend.joins:
        losses = {"whole": train(backend, **settings).losses}
        note(backend, folder, losses)
        disturbs = {"killed": Dies(runs), "survived": Leaves(), "grown": ComesAndGoes()}
        settings["callbacks"] = [disturbs[way]]
    result = train(
        backend,
        **settings,
        checkpoint=Checkpoint(runs, every=4, resume=way == "resumed"),
        ledger=Path(folder, "ledger"),
        timeline=str(Path(folder, "trace.json")) if way == "grown" else None,
    )
    note(backend, folder, {way: result.losses})
    backend.barrier()
    if way == "grown":  # like a script that calls fit a second time
        again = backends.get(name, least)
        assert (again.rank, again.size) == (backend.rank, backend.size)


def note(backend: backends.Backend, folder: str, losses: dict) -> None:
    for name, values in losses.items():
        if backend.rank == 0:
            Path(folder, f"{name}.json").write_text(json.dumps(values))


if __name__ == "__main__":
    main(*sys.argv[1:])
