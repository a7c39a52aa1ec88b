"""A training during which the next generation is prepared; run by ``test_growing``.

    ranks_overlapping.py MODE FOLDER HOSTS

After a few steps rank 0 has the discovery script print HOSTS, and trains on, slowly.

``hands over``: it delays the last steps until it is asked to end. ``fails``: rank 1 of the next
generation exits during its preparation, each time; the training ends after this has happened
twice. ``ends first``: it ends while the next generation is prepared. ``killed``: rank 1 of the
present generation kills itself in this time. ``stays``: it trains until it gets SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import keras

from collective import backends
from collective.elastic import generations
from tests.hosts.ranks_renewed import announce, train_and_note

ANNOUNCED_AT, WAITS_AT, STEP_SECONDS = 3, 14, 0.2
FAILURES = 2


class Slow(keras.callbacks.Callback):
    """Records the time and the generation of each step."""

    def __init__(self, mode: str, folder: Path, hosts: str):
        super().__init__()
        self.mode, self.folder, self.hosts = mode, folder, hosts

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        done, number = int(self.model.optimizer.iterations), generations.number()
        with (self.folder / "steps").open("a") as file:
            file.write(f"{done} {number}\n")
        if number:
            return
        if done == ANNOUNCED_AT:
            announce(self.folder, self.hosts)
        if done > ANNOUNCED_AT and not generations.restart_requested():
            time.sleep(STEP_SECONDS)
        while done == WAITS_AT and not self.goes_on():
            time.sleep(0.01)

    def goes_on(self) -> bool:
        tries = len(list(self.folder.glob("try-*")))
        needed = {"fails": FAILURES, "ends first": 1}
        if self.mode in needed:
            return tries >= needed[self.mode]
        if self.mode == "stays":
            return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        return generations.restart_requested()


def end_meanwhile(folder: Path) -> None:
    while not list(folder.glob("try-*")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def main(mode: str, folder: str, hosts: str) -> None:
    keras.config.set_floatx("float64")
    backend = backends.get("native", backends.Options(min_np=1))
    if backend.rank == 1 and generations.overlaps():
        Path(folder, f"try-{os.getpid()}").touch()
        if mode == "fails":
            os._exit(3)
        if mode in ("ends first", "stays"):
            time.sleep(1000)
    elif backend.rank == 1 and mode == "killed" and not generations.number():
        threading.Thread(
            target=end_meanwhile, args=(Path(folder),), daemon=True
        ).start()
    train_and_note(backend, Path(folder), Slow(mode, Path(folder), hosts))


if __name__ == "__main__":
    main(*sys.argv[1:])
