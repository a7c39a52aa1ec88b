"""Keras' file of weights, with values that variables had at an earlier time."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
from keras.src.saving import saving_lib

from collective import disk
from collective.replacements import replacing

# The attributes that Keras leaves out of a file, by kind of object. Keras 3.15 keeps them by
# one name and looks for them by another, so it finds them each time. To find them Keras
# makes an optimizer, and variables cannot be made in a StatelessScope.
_skipped = functools.cache(saving_lib.get_attr_skipset)


@contextlib.contextmanager
def _skips_known() -> Iterator[None]:
    """Have Keras use the attributes that it found before."""
    for kind in ("Layer", "Functional", "Sequential", "Metric", "Optimizer", "Loss"):
        _skipped(kind)
    with replacing(saving_lib, "get_attr_skipset", _skipped):
        yield


class _Alias:
    """An array that Keras treats as a tensor, and writes without a copy."""

    def __init__(self, array: np.ndarray):
        self.array = np.asarray(array)
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def numpy(self) -> _Alias:
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array if dtype is None else self.array.astype(dtype, copy=False)


class _Given(keras.StatelessScope):
    """Gives variables certain values, and remembers which of them were read."""

    def __init__(self, values: Iterable[tuple[keras.Variable, np.ndarray]]):
        super().__init__()
        self.state_mapping = {id(v): _Alias(value) for v, value in values}
        self.read: set[int] = set()

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Return the given value."""
        self.read.add(id(variable))
        return super().get_current_value(variable)


class _Store(saving_lib.H5IOStore):
    """Keras' store, without the copy of each variable."""

    def __setitem__(self, key: str, value: object) -> None:
        if isinstance(value, keras.Variable):
            value = value.value
        super().__setitem__(key, value)


class _File(io.BytesIO):
    """A file for HDF5 whose errors are raised after HDF5 has closed it.

    HDF5 ends the process (``h5py`` 3.16) if the disk becomes full while it closes a
    file. Here its writes always succeed, and the first error is raised afterwards. HDF5
    also locks a file that it opens itself, even to read it, which fails on a file system
    without locks.
    """

    def __init__(self, path: Path, mode: str):
        super().__init__()
        self._file = io.FileIO(path, mode)
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of it, unless a write has failed before."""
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

    def __exit__(self, *_: object) -> None:
        """Sync the file to disk, and raise the first error."""
        with self._file as file:
            if self._error is not None:
                raise self._error
            if file.writable():
                disk.sync(file.fileno())


def save_weights(
    model: keras.Model,
    variables: Sequence[keras.Variable],
    values: Sequence[np.ndarray],
    path: Path,
) -> list[int]:
    """Do what ``model.save_weights`` does, with values of an earlier time.

    It does not read the variables, so it may run in a thread while the model trains.

    Args:
        model: A built and compiled model.
        path: A new file; its name ends in ``.weights.h5``.

    Returns:
        The indices of the variables that Keras' format does not hold.
    """
    # Keras also writes metrics that are attributes of a model; ours are kept elsewhere.
    zeros = [(v, np.zeros(v.shape, v.dtype)) for v in model.metrics_variables]
    given = _Given([*zeros, *zip(variables, values, strict=True)])
    with (
        _skips_known(),
        _File(path, "w+") as file,
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
            store.close()  # before the file: HDF5 still writes to it
    return [i for i, v in enumerate(variables) if id(v) not in given.read]


def load_weights(
    model: keras.Model, variables: Sequence[keras.Variable], path: Path
) -> list[np.ndarray | None]:
    """Return the values that ``model.load_weights`` would assign, and assign nothing.

    Returns:
        The value of each variable, or None for a variable that is not in the file.

    Raises:
        ValueError: Among others, if an array is not as ``save_weights`` writes it.
    """
    with _File(path, "r") as file:
        with h5py.File(file) as opened:
            _check_arrays(opened)

        class Opened(saving_lib.H5IOStore):
            """Keras' store, for the file that is open."""

            def __init__(self, path: Any, mode: str):
                super().__init__(file, mode=mode)

        with (
            _skips_known(),
            replacing(saving_lib, "H5IOStore", Opened),
            keras.StatelessScope() as scope,
        ):
            model.load_weights(path)
    found = [scope.get_current_value(v) for v in variables]
    return [None if value is None else np.asarray(value) for value in found]


def _check_arrays(file: h5py.File) -> None:
    """Raise ValueError if an array is compressed, or not in the file.

    Keras reads an array before it compares its shape, so a few bytes could otherwise take
    all of the host's memory, and another file of the user could become weights.
    """

    # They return a name, which h5py hands on: not every version lets an error through.
    def foreign(name: str, found: object) -> str | None:
        if not isinstance(found, h5py.Dataset):
            return None
        here = not found.external and not found.is_virtual
        return None if here and found.nbytes <= found.id.get_storage_size() else name

    def elsewhere(name: str, link: object) -> str | None:
        return name if isinstance(link, h5py.ExternalLink) else None

    name = file.visititems(foreign) or file.visititems_links(elsewhere)
    if name:
        raise ValueError(f"{name} is compressed, or in another file")
