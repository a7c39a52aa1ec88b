"""Keras' file of weights, holding values that variables had at another time."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras.src.saving import saving_lib

# What Keras leaves out of a file, by kind of object. It makes an optimizer to find
# that out, each time, and variables cannot be made in a StatelessScope.
_skipped = functools.cache(saving_lib.get_attr_skipset)


@contextlib.contextmanager
def _skips_known() -> Iterator[None]:
    """Keras finds out nothing of that inside."""
    for kind in ("Layer", "Functional", "Sequential", "Metric", "Optimizer", "Loss"):
        _skipped(kind)
    with mock.patch.object(saving_lib, "get_attr_skipset", _skipped):
        yield


class _Alias:
    """A value that Keras can take for a tensor, and write without copying it."""

    def __init__(self, array: np.ndarray):
        self.array = np.asarray(array)
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def numpy(self) -> _Alias:
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array if dtype is None else self.array.astype(dtype, copy=False)


class _Given(keras.StatelessScope):
    """Variables have given values, and those that are read are remembered."""

    def __init__(self, values: Iterable[tuple[keras.Variable, np.ndarray]]):
        super().__init__()
        self.state_mapping = {id(v): _Alias(value) for v, value in values}
        self.read: set[int] = set()

    def get_current_value(self, variable: keras.Variable) -> Any:
        """The given value."""
        self.read.add(id(variable))
        return super().get_current_value(variable)


class _Store(saving_lib.H5IOStore):
    """Keras' store, without the copy that it makes of a variable."""

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, keras.Variable):
            value = value.value
        super().__setitem__(key, value)


class _File(io.BytesIO):
    """A file for HDF5 that never fails before it is closed.

    HDF5 ends the process (``h5py`` 3.16) where a disk turns out to be full while it
    closes a file. Here it writes on in peace, and the error is raised behind it.
    """

    def __init__(self, path: Path):
        super().__init__()
        self._file = path.open("w+b", buffering=0)
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes all of it, if that is still possible."""
        view = memoryview(data).cast("B")
        size, done = len(view), 0
        try:
            while self._error is None and done < size:
                done += self._file.write(view[done:])
        except OSError as error:
            self._error = error
        return size

    def seek(self, place: int, whence: int = 0) -> int:
        return self._file.seek(place, whence)

    def tell(self) -> int:
        return self._file.tell()

    def truncate(self, size: int | None = None) -> int:
        try:
            return self._file.truncate(size)
        except OSError as error:
            self._error = self._error or error
            return size or 0

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        got = self._file.readinto(view) or 0
        view[got:] = bytes(len(view) - got)
        return len(view)

    def __exit__(self, *_: Any) -> None:
        """Brings it to the disk; raises what went wrong."""
        with self._file as file:
            if self._error is not None:
                raise self._error
            os.fsync(file.fileno())


def save_weights(
    model: keras.Model,
    variables: Sequence[keras.Variable],
    values: Sequence[np.ndarray],
    path: Path,
) -> list[int]:
    """``model.save_weights``, with values that variables had at another time.

    May run in a thread of its own while the model trains. No variable is read.

    Args:
        model: A built and compiled model.
        variables: Of model and optimizer.
        values: Theirs.
        path: A file to make; its name ends in ``.weights.h5``.

    Returns:
        The indices of the variables that Keras' format does not hold.

    Raises:
        OSError: If it cannot be written, or not brought to the disk.
    """
    # Metrics in a model's attributes are written, too; ours count elsewhere.
    zeros = [(v, np.zeros(v.shape, v.dtype)) for v in model.metrics_variables]
    given = _Given([*zeros, *zip(variables, values, strict=True)])
    with (
        _skips_known(),
        _File(path) as file,
        given,
    ):
        store = _Store(file, mode="w")
        try:
            saving_lib._save_state(
                model,
                weights_store=store,
                assets_store=None,
                inner_path="",
                visited_saveables=set(),
            )
        finally:
            store.close()  # HDF5 bears no file that is closed before its own
    return [i for i, v in enumerate(variables) if id(v) not in given.read]


def load_weights(
    model: keras.Model, variables: Sequence[keras.Variable], path: str
) -> list[np.ndarray | None]:
    """What ``model.load_weights`` would assign; nothing is assigned.

    Returns:
        The values of the variables, None for those that the file does not hold.
    """
    with _skips_known(), keras.StatelessScope() as scope:
        model.load_weights(path)
    found = [scope.get_current_value(v) for v in variables]
    return [None if value is None else np.asarray(value) for value in found]
