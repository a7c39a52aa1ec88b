"""Services that record experiments: one run for a job, that of rank 0."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import keras

from collective.log import log

# Each has its own way to do nothing.
_OFF = {"WANDB_MODE": "disabled", "NEPTUNE_MODE": "debug"}
_SERVICES = ("wandb", "neptune", "mlflow")
_MLFLOW = "MLFLOW_TRACKING_URI"


def record_on_rank_zero(rank: int) -> Callable[[], None]:
    """Have other ranks record nothing, by the environment that the services read.

    MLflow has no such mode: other ranks write into a folder that is removed at the end.

    Returns:
        What this rank does when it becomes rank 0.
    """
    if rank == 0:
        return lambda: None
    before = {name: os.environ.get(name) for name in (*_OFF, _MLFLOW)}
    os.environ.update(_OFF)
    # MLflow makes it, if the script uses it: a rank that is killed leaves no empty one.
    folder = Path(tempfile.gettempdir(), f"collective-mlflow-{secrets.token_hex(8)}")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[_MLFLOW] = f"file:{folder}"

    def take_over() -> None:
        """Record the runs that begin from now on."""
        begun = [name for name in _SERVICES if name in sys.modules]
        for service in begun:
            log.warning(
                "the run of %s ended with rank 0: what follows is not recorded in it",
                service,
            )
        for name, value in before.items():
            if value is not None:
                os.environ[name] = value
            elif name != _MLFLOW or "mlflow" not in begun:  # else its run is there
                os.environ.pop(name, None)

    return take_over


# Callbacks of these packages open a connection or a file of their own in C.
_PACKAGES = {
    *("wandb", "mlflow", "comet_ml", "neptune", "clearml", "aim", "dvclive"),
    *("swanlab", "tensorboardX"),
}
_KERAS_OWN = (keras.callbacks.TensorBoard, keras.callbacks.RemoteMonitor)


def without_records(
    callbacks: Sequence[keras.callbacks.Callback],
) -> list[keras.callbacks.Callback]:
    """Return the callbacks of a rank other than 0: those that do more than record.

    Summaries that a model writes in each step are part of its graph, while a TensorBoard
    that has asked for them lasts. So another one lasts on these ranks: it writes what
    ``private_files`` keeps from the disk.
    """
    found = []
    for callback in callbacks:
        if not records(callback):
            found.append(callback)
        elif getattr(callback, "update_freq", "epoch") != "epoch":
            board = keras.callbacks.TensorBoard(
                callback.log_dir, update_freq=callback.update_freq, write_graph=False
            )
            found.append(board)
    return found


def records(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback does nothing but record, which rank 0 alone does."""
    packages = {kind.__module__.split(".")[0] for kind in type(callback).__mro__}
    return bool(packages & _PACKAGES) or type(callback) in _KERAS_OWN
