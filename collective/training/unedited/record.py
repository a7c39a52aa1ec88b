"""The results of all units of a script, from which a rank that joins later is answered.

A newcomer runs the script from its start. Whatever the ranks did together is not done
again: each of these units returns to it what it has returned to the others, so its Python
code comes to the same place with the same values. Then it takes the variables.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

#: A record grows no larger: no rank can join a job whose units have returned more.
MOST_BYTES = 1 << 28
_OVERHEAD = 160  # bytes of an entry besides those of its arrays, about


class Entry(NamedTuple):
    """What one unit has returned.

    Attributes:
        tree: The number of a structure, if the result is one of arrays alone, or -1.
        value: The bytes of its arrays one after the other; else the pickled result.
        is_removal: Whether the unit was a removal of a file.
    """

    tree: int
    value: bytes
    is_removal: bool


class Record:
    """The results of units in their order.

    Results of most steps have the same structure, and are a few numbers: each structure
    is kept once.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.bytes = 0
        self._trees: list[tuple[Any, list[tuple[tf.DType, tuple[int, ...]]]]] = []
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, result: Any, is_removal: bool = False) -> bool:
        """Add the result of a unit; return whether it could be kept.

        Args:
            result: Tensors in it are kept as arrays.
        """
        try:
            entry = Entry(*self._packed(result), is_removal)
        except Exception:  # what cannot be pickled
            return False
        self.bytes += len(entry.value) + _OVERHEAD
        self.entries.append(entry)
        return self.bytes <= MOST_BYTES

    def _packed(self, result: Any) -> tuple[int, bytes]:
        leaves = tf.nest.flatten(result)
        numbers = (tf.is_tensor(t) and t.dtype != tf.string for t in leaves)
        if not leaves or not all(numbers) or _has_composites(leaves):
            return -1, pickle.dumps(_with_arrays(result))
        kinds = [(t.dtype, tuple(t.shape)) for t in leaves]
        tree = tf.nest.map_structure(lambda _: None, result)
        name = f"{tree!r} {kinds!r}"
        number = self._numbers.setdefault(name, len(self._numbers))
        if number == len(self._trees):
            self._trees.append((tree, kinds))
        return number, b"".join(t.numpy().tobytes() for t in leaves)

    def result(self, entry: Entry) -> Any:
        """Return the result of which ``add`` has made an entry."""
        if entry.tree < 0:
            return _with_tensors(pickle.loads(entry.value))
        tree, kinds = self._trees[entry.tree]
        leaves, start = [], 0
        for dtype, shape in kinds:
            count = math.prod(shape)
            flat = np.frombuffer(entry.value, dtype.as_numpy_dtype, count, start)
            start += flat.nbytes
            leaves.append(tf.constant(flat.reshape(shape), dtype))
        return tf.nest.pack_sequence_as(tree, leaves)


def _has_composites(leaves: Sequence[Any]) -> bool:
    return any(isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) for leaf in leaves)


class Replay:
    """The units of a newcomer, answered from the record of the others."""

    def __init__(self, record: Record):
        self._record, self._place = record, 0
        others = (i for i, e in enumerate(record.entries) if not e.is_removal)
        self._end = max(others, default=-1) + 1

    @property
    def is_over(self) -> bool:
        """Return whether only removals of files are left."""
        return self._place >= self._end

    @property
    def _is_at_removal(self) -> bool:
        entries = self._record.entries
        return self._place < len(entries) and entries[self._place].is_removal

    def skip_removals(self) -> None:
        """Pass by removals of files that this rank does not make."""
        while self._is_at_removal:
            self._place += 1

    def takes_removal(self) -> bool:
        """Return whether the next unit was a removal of a file, and pass it."""
        found = self._is_at_removal
        self._place += found
        return found

    def result(self) -> Any:
        """Return the result of the next unit."""
        self._place += 1
        return self._record.result(self._record.entries[self._place - 1])


class _Array:
    """Marks an array that was a tensor."""

    def __init__(self, tensor: tf.Tensor):
        self.array = tensor.numpy()


def _with_arrays(result: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: _Array(leaf) if isinstance(leaf, tf.Tensor) else leaf,
        result,
        expand_composites=True,
    )


def _with_tensors(result: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: tf.constant(leaf.array) if isinstance(leaf, _Array) else leaf,
        result,
        expand_composites=True,
    )
