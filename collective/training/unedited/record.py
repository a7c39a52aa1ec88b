"""The results of all units of a script, from which a rank that joins later is answered.

A newcomer runs the script from its start. Whatever the ranks did together is not done
again: each of these units returns to it what it has returned to the others, so its Python
code comes to the same place with the same values. Then it takes the variables.
"""

from __future__ import annotations

import math
import pickle
import sys
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from collective.training.process.portable import is_composite, opened, portable

#: A record grows no larger: no rank can join a job whose units have returned more.
MOST_BYTES = 1 << 28
_OVERHEAD = 160  # bytes of an entry besides those of its arrays, about


class Entry(NamedTuple):
    """What one unit has returned.

    Attributes:
        tree: The number of a structure, if the result is one of arrays alone, or -1.
        value: The bytes of its arrays one after the other; else the pickled result.
        what: Names the unit.
        is_removal: Whether the unit was a removal of a file.
    """

    tree: int
    value: bytes
    what: str
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

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        kinds = [[(d.name, s) for d, s in kinds] for _, kinds in self._trees]
        state["_trees"] = [(t, k) for (t, _), k in zip(self._trees, kinds, strict=True)]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._trees = [
            (tree, [(tf.as_dtype(name), shape) for name, shape in kinds])
            for tree, kinds in state["_trees"]
        ]

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, result: Any, what: str = "", is_removal: bool = False) -> bool:
        """Add the result of a unit; return whether it could be kept.

        Args:
            result: Tensors in it are kept as arrays.
            what: Names the unit.
            is_removal: Whether it was a removal of a file.
        """
        try:
            entry = Entry(*self._packed(result), sys.intern(what), is_removal)
        except Exception:  # what cannot be pickled
            return False
        self.bytes += len(entry.value) + _OVERHEAD
        self.entries.append(entry)
        return self.bytes <= MOST_BYTES

    def _packed(self, result: Any) -> tuple[int, bytes]:
        leaves = tf.nest.flatten(result)
        numbers = (tf.is_tensor(t) and t.dtype != tf.string for t in leaves)
        if not leaves or not all(numbers) or any(map(is_composite, leaves)):
            return -1, pickle.dumps(portable(result))
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
            return opened(pickle.loads(entry.value))
        tree, kinds = self._trees[entry.tree]
        leaves, start = [], 0
        for dtype, shape in kinds:
            count = math.prod(shape)
            flat = np.frombuffer(entry.value, dtype.as_numpy_dtype, count, start)
            start += flat.nbytes
            leaves.append(tf.constant(flat.reshape(shape), dtype))
        return tf.nest.pack_sequence_as(tree, leaves)


class OtherUnit(Exception):
    """A script comes to another unit than the one that is recorded."""

    def __init__(self, recorded: str, found: str):
        super().__init__(f"it comes to {found!r}, where {recorded!r} is recorded")


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

    def result(self, what: str) -> Any:
        """Return the result of the next unit.

        Args:
            what: Names the unit that the script has come to.

        Raises:
            OtherUnit: The ranks that were there made another one.
        """
        entry = self._record.entries[self._place]
        if entry.what != what:
            raise OtherUnit(entry.what, what)
        self._place += 1
        return self._record.result(entry)
