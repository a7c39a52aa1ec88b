"""Rows of arrays and tensors, in memory or memory-mapped."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.input.leaves import open_rows, present
from collective.training.input.source import Row, Source, numpy_rows

# Up to this size, data in memory is copied to TensorFlow, which then gathers rows itself.
# Python would hold its lock, which the training loop needs, for about 0.3 ms a step.
_RESIDENT_BYTES = 256 << 20


class Arrays(Source):
    """Arrays of equal length, one row of the data set in each row.

    A batch copies its own rows and nothing else, so a memory-mapped array is never loaded
    whole.

    Args:
        x: Array ``[rows, ...]``, ``tf.RaggedTensor`` or ``tf.SparseTensor``; or a dict
            or tuple of such. Lists count as arrays.
        y, sample_weight: Likewise, or None.

    Raises:
        UsageError: Lengths differ, or TensorFlow has no dtype for an array.
    """

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None):
        found: list[tuple[str, Any]] = []

        def arrays(part: Any, name: str) -> Any:
            return None if part is None else _arrays(part, name, found)

        self.tree: Row = (
            arrays(x, "x"),
            arrays(y, "y"),
            arrays(sample_weight, "sample_weight"),
        )
        self._leaves = present(self.tree)
        (first, array), *_ = found
        self._rows = int(array.shape[0])
        for name, array in found:
            if array.shape[0] != self._rows:
                raise UsageError(
                    f"{first} has {self._rows} rows, {name} has {array.shape[0]}",
                    hint="give every array the same length: one entry for each row",
                )

    def __len__(self) -> int:
        return self._rows

    @property
    def spec(self) -> Row:
        """``(x, y, sample_weight)`` of one row, as far as it has a fixed shape."""
        return tf.nest.map_structure(
            lambda s: None if s is None else s._unbatch(), self.batch_spec
        )

    @property
    def batch_spec(self) -> Row:
        """Like ``Source.batch_spec``, also for ragged and sparse tensors."""

        def spec(leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray):
                leaf = leaf.view(np.ndarray)  # TensorFlow reads all of a mapped array
            return leaf if leaf is None else open_rows(tf.type_spec_from_value(leaf))

        return tf.nest.map_structure(spec, self.tree)

    def read(self, rows: tf.Tensor) -> Row:
        """Copy the rows out of the arrays."""
        if self._resident is None:
            read = numpy_rows(self._copied, rows, present(self.spec))
        else:
            read = [
                keras_compat.data.sparse_rows(tensor, rows)
                if isinstance(leaf, tf.SparseTensor)
                else tf.gather(tensor, rows)
                for tensor, leaf in zip(self._resident, self._leaves, strict=True)
            ]
        left = iter(read)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(left), self.tree
        )

    def _copied(self, rows: np.ndarray) -> list[np.ndarray]:
        return [_native(_whole(array)[rows]) for array in self._leaves]

    @functools.cached_property
    def _resident(self) -> list[Any] | None:
        """Return the leaves as tensors to read rows of, or None if they are large or on disk.

        Ragged and sparse tensors are in memory anyway, and what is beside them goes
        along.
        """
        arrays = [leaf for leaf in self._leaves if isinstance(leaf, np.ndarray)]
        large = sum(array.nbytes for array in arrays) > _RESIDENT_BYTES
        mapped = any(isinstance(array, np.memmap) for array in arrays)
        if len(arrays) == len(self._leaves) and (large or mapped):
            return None
        # Outside the graph that is traced: inside, they would be its constants.
        with tf.init_scope(), tf.device("CPU:0"):
            return [_tensor(leaf) for leaf in self._leaves]

    def label_range(self) -> tuple[int, int] | None:
        """Return the smallest and the largest label, if y is one array of integers."""
        y = self.tree[1]
        if not isinstance(y, np.ndarray) or y.dtype.kind not in "iu" or not y.size:
            return None
        return int(y.min()), int(y.max())


def _arrays(tree: Any, name: str, found: list[tuple[str, Any]]) -> Any:
    """Return the tree with arrays and tensors as leaves, which are also added to ``found``."""
    if isinstance(tree, Mapping):
        return {key: _arrays(tree[key], f"{name}[{key!r}]", found) for key in tree}
    if isinstance(tree, tuple):
        parts = [_arrays(part, f"{name}[{i}]", found) for i, part in enumerate(tree)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    array = tree
    if not isinstance(tree, (tf.RaggedTensor, tf.SparseTensor)):
        try:
            # Memory maps pass through: they are arrays already.
            array = tree if isinstance(tree, np.ndarray) else np.asarray(tree)
            tf.as_dtype(array.dtype)
        except (TypeError, ValueError):
            array = None
        if array is None or array.dtype == object or not array.ndim:
            raise UsageError(
                f"{name} is not an array that can be trained on: {_kind(tree)}",
                hint=f"make {name} a NumPy array of numbers with one entry for each "
                "row",
            )
    found.append((name, array))
    return array


def _kind(tree: Any) -> str:
    dtype = getattr(tree, "dtype", None)
    shape = f" of shape {tree.shape}" if hasattr(tree, "shape") else ""
    return type(tree).__name__ + (f" of {dtype}" if dtype is not None else "") + shape


def _tensor(leaf: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        return keras_compat.data.sparse_by_rows(leaf)  # which can be read in any order
    return tf.convert_to_tensor(_native(leaf)) if isinstance(leaf, np.ndarray) else leaf


def _whole(array: np.ndarray) -> np.ndarray:
    """Return the array, if it is mapped from a file that is still as long as it was.

    Raises:
        UsageError: If not: to read it would end the process by SIGBUS.
    """
    if not isinstance(array, np.memmap):
        return array
    name = array.filename
    if name is not None:
        try:
            size = os.stat(name).st_size
        except FileNotFoundError:
            return array  # removed, and still whole as long as it is mapped
        if size < array.offset + array.nbytes:
            raise UsageError(
                f"{name} has become shorter while it is read: {size} bytes",
                hint="write data under another name, and rename it",
                everywhere=False,
            )
    return array


def _native(array: np.ndarray) -> np.ndarray:
    """Return the array as TensorFlow needs it: in native byte order, text in UTF-8."""
    if array.dtype.kind == "U":
        return np.char.encode(array, "utf-8")
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))
