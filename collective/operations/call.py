"""From arrays to a request of the C interface, and handles for running ones."""

from __future__ import annotations

import bisect
import ctypes
import itertools
import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from collective import library, session
from collective.errors import UsageError
from collective.operations.kinds import Kind, dtype_number
from collective.process_set import ProcessSet, members

Result = TypeVar("Result")

# No code of the core: until wait() has returned once.
_NOT_ENDED = -1


class Handle(Generic[Result]):
    """A collective under way.

    Its arrays must not be touched before ``wait()`` has returned. Threads may share it.
    """

    def __init__(self, pointer: ctypes.c_void_p, keep: object, result: Result):
        self._lock = threading.Lock()  # of who waits
        self._pointer: ctypes.c_void_p | None = pointer
        self._keep = keep
        self._result = result
        # How it has ended: a code of the core, and its message.
        self._code, self._message = _NOT_ENDED, "wait() was interrupted"

    def wait(self) -> Result:
        """Waits for the end; may be called again, and by several threads.

        Returns:
            What the blocking call returns.

        Raises:
            CollectiveError: What the blocking call raises, each time.
        """
        with self._lock:
            if self._pointer is not None:
                pointer, self._pointer = self._pointer, None
                self._code = library.load().collective_wait(pointer)
                self._message = library.message() if self._code else ""
                self._keep = None
        if self._code:
            raise library.error_from(self._code, self._message)
        return self._result

    def done(self) -> bool:
        """Whether ``wait()`` would return at once."""
        # While a thread waits, the pointer is its own.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._pointer is None or bool(
                library.load().collective_finished(self._pointer)
            )
        finally:
            self._lock.release()

    def __del__(self) -> None:
        # The core still reads and writes the arrays: they must outlive it.
        if getattr(self, "_pointer", None) is not None:
            library.load().collective_wait(self._pointer)


class Call:
    """One request and everything it points to.

    Args:
        kind: Which collective.
        arrays: Pairs of input and output, C-contiguous, of one dtype each.
        process_set: The ranks that take part; None for all.
        name: Shown in errors, and compared between ranks.
        fields: Other fields of ``collective_request``.
        counts: Elements per rank, where the collective needs them.
    """

    def __init__(
        self,
        kind: Kind,
        arrays: Sequence[tuple[np.ndarray, np.ndarray]] = (),
        *,
        process_set: ProcessSet | None = None,
        name: str | None = None,
        counts: Sequence[int] = (),
        **fields: int,
    ):
        group, number, _ = members(process_set)
        if number < 0:
            raise UsageError(
                f"rank {session.rank()} is not in {process_set!r}",
                hint="call it on the members of the set only",
            )
        self.arrays = arrays
        self.tensors = (library.Tensor * len(arrays))()
        self.shapes = []
        for tensor, (source, target) in zip(self.tensors, arrays, strict=True):
            shape = (ctypes.c_int64 * source.ndim)(*source.shape)
            self.shapes.append(shape)
            tensor.input = source.ctypes.data
            tensor.output = target.ctypes.data
            tensor.count = source.size
            tensor.shape = shape
            tensor.dimensions = source.ndim
            tensor.dtype = dtype_number(source.dtype)
        self.counts = (ctypes.c_int64 * len(counts))(*counts)
        fields.setdefault("transport", -1)
        self.request = library.Request(
            kind=int(kind),
            group=group,
            tensors_length=len(arrays),
            tensors=self.tensors,
            counts=self.counts,
            counts_length=len(counts),
            name=(name or "").encode(),
            **fields,
        )

    def run(self, result: Result) -> Result:
        """Runs it to the end and returns ``result``."""
        library.check(library.load().collective_run(ctypes.byref(self.request)))
        return result

    def start(self, result: Result) -> Handle[Result]:
        """Starts it; the handle's ``wait()`` returns ``result``."""
        pointer = ctypes.c_void_p()
        library.check(
            library.load().collective_start(
                ctypes.byref(self.request), ctypes.byref(pointer)
            )
        )
        return Handle(pointer, self, result)


def contiguous(array: object) -> np.ndarray:
    """The array itself if its elements lie one behind the other, else a copy.

    Elements in another byte order than this machine's are converted.
    """
    array = np.asarray(array)
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="), order="C")
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def apart(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Inputs that no output overlaps, but an input's own where it is in place.

    Args:
        sources: Inputs, C-contiguous.
        targets: Outputs, C-contiguous, one for each input; in place where both have the
            same memory.

    Returns:
        The inputs, copied where an output would overwrite what is still to be read.

    Raises:
        UsageError: If two outputs overlap: only one result can be there.
    """
    ends: list[tuple[int, int, int]] = sorted(
        (*_extent(target), place)
        for place, target in enumerate(targets)
        if target.nbytes
    )
    for (_, end, one), (start, _, other) in itertools.pairwise(ends):
        if start < end:
            raise UsageError(
                f"rank {session.rank()}: out[{one}] and out[{other}] overlap",
                hint="give each result memory of its own",
            )
    starts = [start for start, _, _ in ends]

    def overlaps(place: int, source: np.ndarray) -> bool:
        start, end = _extent(source)
        if source.nbytes == 0:
            return False
        # The outputs do not overlap: the last that starts before this one's end ends
        # last of those.
        last = bisect.bisect_left(starts, end) - 1
        first = last
        while first >= 0 and ends[first][1] > start:
            if (*ends[first][:2], ends[first][2]) != (start, end, place):
                return True
            first -= 1
        return False

    return [
        source.copy() if overlaps(place, source) else source
        for place, source in enumerate(sources)
    ]


def _extent(array: np.ndarray) -> tuple[int, int]:
    start = array.ctypes.data
    return start, start + array.nbytes


def output(
    out: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """``out`` if it can hold the result, or a new array.

    Raises:
        UsageError: If it cannot.
    """
    if out is None:
        return np.empty(shape, dtype)
    fits = out.shape == shape and out.dtype == dtype
    if not fits or not out.flags.c_contiguous or not out.flags.writeable:
        raise UsageError(
            f"out is {out.dtype}{list(out.shape)}, and the result {dtype}{list(shape)}",
            hint="pass a writable, C-contiguous array of the result's shape and dtype, "
            "in this machine's byte order",
        )
    return out


def check_splits(splits: Sequence[int], shape: tuple[int, ...], size: int) -> None:
    """Checks a list of how many rows go to each rank.

    Args:
        splits: Rows for each rank.
        shape: Of the array that is split.
        size: Number of ranks.

    Raises:
        UsageError: If they are not one for each rank, adding up to the first axis.
    """
    fits = shape and len(splits) == size and min(splits) >= 0
    if not fits or sum(splits) != shape[0]:
        raise UsageError(
            f"splits {list(splits)} do not fit {list(shape)} and {size} ranks",
            hint="give each rank its number of rows, adding up to the first axis",
        )


def exchange(
    values: Sequence[int], process_set: ProcessSet | None, what: str
) -> np.ndarray:
    """Every rank's list of equally many integers, one row a rank.

    Args:
        values: This rank's.
        process_set: The ranks that take part; None for all.
        what: Compared between ranks: they must agree on it.
    """
    _, _, size = members(process_set)
    mine = np.asarray(values, np.int64)
    rows = np.empty((size, mine.size), np.int64)
    call = Call(
        Kind.ALL_GATHER,
        [(mine, rows)],
        process_set=process_set,
        name=what,
        counts=[mine.size] * size,
    )
    return call.run(rows)
