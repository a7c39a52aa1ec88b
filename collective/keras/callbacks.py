"""The callbacks of ``collective.tensorflow.keras``."""

from __future__ import annotations

from collective.tensorflow.keras import callbacks
from collective.tensorflow.keras.callbacks import *  # noqa: F403


class BestModelCheckpoint(callbacks.BestModelCheckpoint):  # type: ignore[no-redef]
    """``tensorflow.keras``' callback for whole models only, as in ``horovod.keras``."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | None = None,
    ):
        super().__init__(monitor, verbose, False, mode, save_freq, filepath)
