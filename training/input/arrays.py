"""Rows of NumPy arrays, in memory or memory-mapped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from collective.errors import UsageError
from collective.training.input.source import Row, Source

# Up to this size, data in memory is copied to TensorFlow, which then gathers rows itself.
# Python would hold its lock, which the training loop needs, for about 0.3 ms a step.
_RESIDENT_BYTES = 256 << 20


class Arrays(Source):
    """Arrays of equal length, one row of the data set in each row.

    A batch copies its own rows and nothing else, so a memory-mapped array is never loaded
    whole.

    Args:
        x: Array ``[rows, ...]``, or a dict or tuple of such. Lists count as arrays.
        y: Likewise, or None.
        sample_weight: Likewise, or None.

    Raises:
        UsageError: Lengths differ, or TensorFlow has no dtype for an array.
    """

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None):
        self.tree: Row = (
            _arrays(x, "x"),
            None if y is None else _arrays(y, "y"),
            None if sample_weight is None else _arrays(sample_weight, "sample_weight"),
        )
        self._leaves = [a for a in tf.nest.flatten(self.tree) if a is not None]
        names = [path for path, a in _named(self.tree) if a is not None]
        lengths = [len(array) for array in self._leaves]
        for name, length in zip(names, lengths, strict=True):
            if length != lengths[0]:
                raise UsageError(
                    f"{names[0]} has {lengths[0]} rows, {name} has {length}",
                    hint="give every array the same length: one entry for each row",
                )
        self._rows = lengths[0]
        self._resident: list[tf.Tensor] | None = None

    def __len__(self) -> int:
        return self._rows

    @property
    def spec(self) -> Row:
        """``(x, y, sample_weight)`` of one row, as trees of ``tf.TensorSpec``."""
        return tf.nest.map_structure(
            lambda a: None if a is None else tf.TensorSpec(a.shape[1:], a.dtype),
            self.tree,
        )

    def read(self, rows: tf.Tensor) -> Row:
        """Copies the rows out of the arrays."""
        dtypes = [tf.as_dtype(array.dtype) for array in self._leaves]
        if resident := self._tensors():
            read = [tf.gather(tensor, rows) for tensor in resident]
        else:
            read = tf.numpy_function(
                lambda rows: [_native(array[rows]) for array in self._leaves],
                [rows],
                dtypes,
                stateful=False,
            )
        # flatten keeps a None in its place.
        left = iter(zip(read, self._leaves, strict=True))

        def shaped(array: Any) -> Any:
            if array is None:
                return None
            tensor, leaf = next(left)
            tensor.set_shape([rows.shape[0], *leaf.shape[1:]])
            return tensor

        flat = [shaped(array) for array in tf.nest.flatten(self.tree)]
        return tf.nest.pack_sequence_as(self.tree, flat)

    def _tensors(self) -> list[tf.Tensor] | None:
        """The arrays as tensors, if they are small and in memory."""
        size = sum(array.nbytes for array in self._leaves)
        mapped = any(isinstance(array, np.memmap) for array in self._leaves)
        if self._resident is None and size <= _RESIDENT_BYTES and not mapped:
            # Outside the graph that is traced: inside, they would be its constants.
            with tf.init_scope(), tf.device("CPU:0"):
                self._resident = [
                    tf.convert_to_tensor(_native(array)) for array in self._leaves
                ]
        return self._resident

    def label_range(self) -> tuple[int, int] | None:
        """Smallest and largest label, if y is one array of integers."""
        y = self.tree[1]
        if not isinstance(y, np.ndarray) or y.dtype.kind not in "iu" or not y.size:
            return None
        return int(y.min()), int(y.max())


def _arrays(tree: Any, name: str) -> Any:
    """The tree with arrays as leaves; see Arrays for what is allowed."""
    if isinstance(tree, Mapping):
        return {key: _arrays(tree[key], f"{name}[{key!r}]") for key in tree}
    if isinstance(tree, tuple):
        parts = [_arrays(part, f"{name}[{i}]") for i, part in enumerate(tree)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    try:
        # Memory maps pass through: they are arrays already.
        array = tree if isinstance(tree, np.ndarray) else np.asarray(tree)
        tf.as_dtype(array.dtype)
    except (TypeError, ValueError):
        array = None
    if array is None or array.dtype == object or not array.ndim:
        raise UsageError(
            f"{name} is not an array that can be trained on: {_kind(tree)}",
            hint=f"make {name} a NumPy array of numbers with one entry for each row",
        )
    return array


def _kind(tree: Any) -> str:
    dtype = getattr(tree, "dtype", None)
    shape = f" of shape {tree.shape}" if hasattr(tree, "shape") else ""
    return type(tree).__name__ + (f" of {dtype}" if dtype is not None else "") + shape


def _named(tree: Row) -> list[tuple[str, Any]]:
    """The leaves with their names, in the order of ``tf.nest.flatten``."""
    named: list[tuple[str, Any]] = []

    def visit(name: str, part: Any) -> None:
        if isinstance(part, Mapping):
            for key in sorted(part):
                visit(f"{name}[{key!r}]", part[key])
        elif isinstance(part, tuple):
            for number, one in enumerate(part):
                visit(f"{name}[{number}]", one)
        else:
            named.append((name, part))

    for name, part in zip(("x", "y", "sample_weight"), tree, strict=True):
        visit(name, part)
    return named


def _native(array: np.ndarray) -> np.ndarray:
    """The array as TensorFlow needs it: in native byte order, text in UTF-8."""
    if array.dtype.kind == "U":
        return np.char.encode(array, "utf-8")
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))
