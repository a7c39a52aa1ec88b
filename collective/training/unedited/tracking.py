"""Services that record experiments: one run for a job, that of rank 0."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# Each has its own way to do nothing.
_OFF = {"WANDB_MODE": "disabled", "NEPTUNE_MODE": "debug"}
_MLFLOW = "MLFLOW_TRACKING_URI"


def record_on_rank_zero(rank: int) -> None:
    """Has other ranks record nothing, by the environment that the services read.

    MLflow has no such mode: other ranks write into a folder that is removed at the end.
    """
    if rank == 0:
        return
    os.environ.update(_OFF)
    folder = tempfile.mkdtemp(prefix="collective-mlflow-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[_MLFLOW] = f"file:{folder}"
