"""Requests of the extension, handles, and the conversion of arrays for both."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from collective import library, session
from collective.errors import CollectiveError, UsageError
from collective.operations.kinds import Kind, dtype_number
from collective.process_set import ProcessSet, members

Result = TypeVar("Result")

_HOST_MEMORY = (1, 3)  # of DLPack: the CPU's, and memory pinned for a GPU


class Handle(Generic[Result]):
    """A collective under way.

    Its arrays must not be touched before ``wait()`` has returned. Threads may share it.
    """

    __slots__ = ("_result", "_running")

    def __init__(self, running: Any, result: Result):
        self._running = running  # keeps the arrays, and waits if nobody calls ``wait``
        self._result = result

    def wait(self) -> Result:
        """Wait for the end; may be called again, and by several threads.

        Returns:
            The return value of the blocking call.

        Raises:
            CollectiveError: Each time, if the blocking call would raise it.
        """
        self._running.wait()
        return self._result

    def done(self) -> bool:
        """Return whether ``wait()`` would return at once."""
        return self._running.done()


class Call(Generic[Result]):
    """One request, of arrays that the extension takes.

    Args:
        kind: The collective.
        arrays: Pairs of input and output, C-contiguous, of one dtype each.
        result: The value that ``run`` and a handle's ``wait`` return.
        process_set: The ranks that take part; None for all.
        name: Shown in errors, and compared between ranks.
        op, algorithm, transport, root: Numbers of the C interface.
        counts: Elements per rank, if the collective needs them.
        order, plan: For ``Call.start``: 1 for the order by names, as TensorFlow's ops
            have it, and the number of the traced function.
    """

    def __init__(
        self,
        kind: Kind,
        arrays: Sequence[tuple[np.ndarray, np.ndarray]],
        result: Result,
        *,
        process_set: ProcessSet | None = None,
        name: str | None = None,
        op: int = 0,
        algorithm: int = 0,
        transport: int = -1,
        root: int = 0,
        counts: list[int] | None = None,
        order: int = 0,
        plan: int = 0,
    ):
        _, number, _ = members(process_set)
        if number < 0:
            raise UsageError(
                f"rank {session.rank()} is not in {process_set!r}",
                hint="call it on the members of the set only",
            )
        for source, _ in arrays:
            dtype_number(source.dtype)
        self.arguments = (
            *(int(kind), True),
            [source for source, _ in arrays],
            [target for _, target in arrays],
            *(op, name, process_set, algorithm, transport, root, counts),
        )
        self.by_name = order, plan
        self.result = result

    def run(self) -> Result:
        """Run the call to its end."""
        self._taken(library.extension().run(*self.arguments))
        return self.result

    def start(self) -> Handle[Result]:
        """Start the call."""
        started = library.extension().start(*self.arguments, *self.by_name)
        running, _ = self._taken(started)
        return Handle(running, self.result)

    def time(self, repetitions: int, inner: int) -> np.ndarray:
        """Return the seconds of each repetition, without the time of Python."""
        seconds = library.extension().time(*self.arguments, repetitions, inner)
        return np.array(self._taken(seconds))

    def _taken(self, answer: Any) -> Any:
        if answer is None:
            raise CollectiveError(
                f"the native core does not take the arguments {self.arguments}",
                hint="this is a defect; please report it",
            )
        return answer


def single(
    kind: Kind,
    source: np.ndarray,
    out: Any,
    shape: tuple[int, ...],
    process_set: ProcessSet | None,
    name: str | None,
    **numbers: Any,
) -> Call[np.ndarray]:
    """Return the call of one array.

    Args:
        kind, process_set, name, numbers: As for ``Call``.
        source: C-contiguous; copied if the output would overwrite it.
        out: Receives the result, and is returned by the call; None for a new array.
        shape: Shape of the result.

    Raises:
        UsageError: If ``out`` cannot hold the result.
    """
    target = output(out, shape, source.dtype)
    if out is not None:
        (source,) = apart([source], [target])
    result = target if out is None else out
    return Call(
        kind, [(source, target)], result, process_set=process_set, name=name, **numbers
    )


def start_call(*arguments: Any) -> Handle[Any] | None:
    """Call ``run`` of the extension; return a handle of the outputs.

    Returns None, and does nothing, if an argument is not plain. ``kDocs`` of
    native/bindings/python.cc has the arguments.
    """
    started = library.extension().start(*arguments)
    return None if started is None else Handle(*started)


def contiguous(array: object) -> np.ndarray:
    """Return a view of the array if it is contiguous, else a contiguous copy.

    Takes anything that NumPy sees as an array, or that offers DLPack on the CPU.
    Elements in another byte order than this machine's are converted.

    Raises:
        UsageError: If the array is not in this process' memory.
    """
    array = _viewed(array)
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="), order="C")
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _viewed(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack__"):
        return np.asarray(array)
    kind, _ = array.__dlpack_device__()
    if kind not in _HOST_MEMORY:
        raise UsageError(
            f"{type(array).__name__} is in the memory of a device",
            hint="copy it to the CPU first",
        )
    try:
        return np.from_dlpack(array)
    except Exception:  # each library raises errors of its own
        pass  # a dtype or a state that only its own conversion knows
    try:
        return np.asarray(array)
    except Exception as error:
        raise UsageError(
            f"{type(array).__name__} is not an array for NumPy: {error}",
            hint="convert it to a NumPy array first",
        ) from error


def apart(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return the inputs, copied if an output would overwrite them before they are read.

    Args:
        sources: Inputs, C-contiguous.
        targets: Outputs, C-contiguous, one for each input; in place if both have the
            same memory.

    Raises:
        UsageError: If two outputs overlap: they cannot hold both results.
    """
    if len(targets) == 1 and not np.may_share_memory(sources[0], targets[0]):
        return list(sources)
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
    starts, stops = [start for start, _, _ in ends], [end for _, end, _ in ends]

    def overlaps(place: int, source: np.ndarray) -> bool:
        start, end = _extent(source)
        first, last = bisect.bisect_right(stops, start), bisect.bisect_left(starts, end)
        others = (found != (start, end, place) for found in ends[first:last])
        return source.nbytes > 0 and any(others)

    return [
        source.copy() if overlaps(place, source) else source
        for place, source in enumerate(sources)
    ]


def _extent(array: np.ndarray) -> tuple[int, int]:
    start = array.ctypes.data
    return start, start + array.nbytes


def output(out: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a view of ``out``, which must fit the result, or a new array."""
    if out is None:
        return np.empty(shape, dtype)
    view = _writable(out)
    if view is None:
        raise UsageError(
            f"out is a {type(out).__name__}, which gives no writable memory",
            hint="pass a NumPy array, or one that shares its memory with NumPy",
        )
    fits = view.shape == shape and view.dtype == dtype
    if not fits or not view.flags.c_contiguous or not view.flags.writeable:
        state = "" if view.flags.writeable else "read-only "
        raise UsageError(
            f"out is {state}{view.dtype}{list(view.shape)}, "
            f"and the result {dtype}{list(shape)}",
            hint="pass a writable, C-contiguous array of the result's shape and dtype, "
            "in this machine's byte order",
        )
    return view


def _writable(out: Any) -> np.ndarray | None:
    if isinstance(out, np.ndarray):
        return out
    if hasattr(out, "__dlpack__") and not isinstance(out, np.generic):
        view = _viewed(out)
        if not view.flags.writeable:
            # Older forms of DLPack cannot say that memory may be written.
            other = np.asarray(out) if hasattr(out, "__array__") else view
            same = other.dtype == view.dtype and np.shares_memory(other, view)
            view = other if same else view
        return view
    if hasattr(out, "__array_interface__") and not isinstance(out, np.generic):
        return np.asarray(out)
    try:
        return np.asarray(memoryview(out))
    except TypeError:
        return None


def check_splits(splits: Sequence[int], shape: tuple[int, ...], size: int) -> None:
    """Refuse numbers of rows, one a rank, that do not add up to the first axis."""
    fits = shape and len(splits) == size and min(splits) >= 0
    if not fits or sum(splits) != shape[0]:
        raise UsageError(
            f"splits {list(splits)} do not fit {list(shape)} and {size} ranks",
            hint="give each rank its number of rows, adding up to the first axis",
        )


def exchange(
    values: Sequence[int], process_set: ProcessSet | None, what: str
) -> np.ndarray:
    """Return every rank's list of equally many integers, one row a rank.

    ``what`` is compared between ranks: they must agree on it.
    """
    _, _, size = members(process_set)
    mine = np.asarray(values, np.int64)
    shape, counts = (size, mine.size), [mine.size] * size
    return single(
        Kind.ALL_GATHER, mine, None, shape, process_set, what, counts=counts
    ).run()
