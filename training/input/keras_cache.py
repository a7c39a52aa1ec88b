"""Keras' own data sets, from the folder where Keras keeps them.

The first rank on a host downloads what is missing; other ranks wait. Where a download is
impossible, the error says which file to put where.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras

from collective.errors import UsageError


def folder() -> Path:
    """``$KERAS_HOME/datasets``, or ``~/.keras/datasets``."""
    home = os.environ.get("KERAS_HOME") or os.path.join("~", ".keras")
    return Path(home).expanduser() / "datasets"


def mnist() -> Path:
    """The path of ``mnist.npz``, downloaded if it is missing.

    Raises:
        UsageError: It is missing and cannot be downloaded.
    """
    path = folder() / "mnist.npz"
    with one_at_a_time("mnist"):
        # Under the lock: another rank may be downloading it.
        if not path.exists():
            _fetch("mnist", path, "mnist.npz")
    return path


def cifar10() -> Any:
    """``(x_train, y_train), (x_test, y_test)``, downloaded if missing.

    Raises:
        UsageError: It is missing and cannot be downloaded, or is damaged.
    """
    path = folder() / "cifar-10-batches-py-target" / "cifar-10-batches-py"
    with one_at_a_time("cifar10"):
        return _fetch("cifar10", path, "cifar-10-python.tar.gz, unpacked,")


def _fetch(name: str, path: Path, file: str) -> Any:
    try:
        return getattr(keras.datasets, name).load_data()
    # No network, no permission to write, a damaged file: the remedy is the same.
    except Exception as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"{name} is not in Keras' cache and cannot be fetched: {text[0]}",
            hint=f"put {file} at {path} (or set KERAS_HOME), or give any file with "
            "--data FILE.npz, or use --data digits",
        ) from error


@contextlib.contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Holds a lock file in the cache: ranks of a host must not download together."""
    lock = folder() / f".{name}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = open(lock, "w")  # noqa: SIM115
    except OSError:  # a read-only cache: no rank downloads into it
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
