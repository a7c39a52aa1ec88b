"""All-reduce: the sum (or mean, ...) over all ranks, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective import library
from collective.errors import UsageError
from collective.operations.call import (
    Call,
    Handle,
    apart,
    contiguous,
    output,
    start_call,
)
from collective.operations.kinds import (
    Average,
    Kind,
    Op,
    algorithm_number,
    op_number,
    transport_number,
)
from collective.process_set import ProcessSet

_KIND = int(Kind.ALL_REDUCE)


def allreduce(
    array: np.ndarray,
    op: Op = Average,
    out: np.ndarray | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    *,
    algorithm: str = "auto",
    transport_dtype: str | None = None,
) -> np.ndarray:
    """Reduce an array over all ranks; the same bits on every rank.

    Args:
        array: Equal shape and dtype on every rank. float16 and bfloat16 are summed in
            float32 and rounded once (with the direct algorithms). An array of NumPy, or
            of a library that shares its memory with NumPy (docs/reference/python.md);
            an array that is not C-contiguous is copied.
        op: Average, Sum, Min, Max or Product.
        out: Receives the result, ``array`` itself to reduce in place; a new array by
            default. If it overlaps the input in another way, the input is copied.
        name: Shown in errors; must be the same on every rank.
        process_set: The ranks that take part; None for all.
        algorithm: ``auto``, ``direct``, ``one-shot``, ``halving-doubling`` or
            ``hierarchical``; the last two are ``direct`` on one host; see
            docs/explanation/algorithms.md.
        transport_dtype: ``float16`` or ``bfloat16``: the type in which float32 elements
            travel. They are summed in float32; every rank gets the rounded sum.

    Returns:
        The result, of the shape and dtype of ``array``, in this machine's byte order.

    Raises:
        Disagreement: On every rank, if the ranks did not make the same call.
        PeerLost: If a rank died or left.
        Timeout: If a rank did not make the call in time.
        UsageError: If an argument is invalid.
    """
    plain = library.extension().run(
        _KIND, False, array, out, op, name, process_set,
        algorithm, transport_dtype, 0, None,
    )  # fmt: skip
    if plain is not None:
        return plain
    choices = op, name, process_set, algorithm, transport_dtype
    return _call(False, array, out, *choices).run()


def allreduce_async(
    array: np.ndarray,
    op: Op = Average,
    out: np.ndarray | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    *,
    algorithm: str = "auto",
    transport_dtype: str | None = None,
) -> Handle[np.ndarray]:
    """Start ``allreduce``; return at once a handle to wait for."""
    request = (
        _KIND, False, array, out, op, name, process_set,
        algorithm, transport_dtype, 0, None,
    )  # fmt: skip
    plain = start_call(*request)
    return _call(*request[1:-2]).start() if plain is None else plain


def grouped_allreduce(
    arrays: Sequence[np.ndarray],
    op: Op = Average,
    out: Sequence[np.ndarray] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    *,
    algorithm: str = "auto",
    transport_dtype: str | None = None,
) -> list[np.ndarray]:
    """Reduce a list of arrays, of any mixture of shapes and dtypes, as one.

    Arguments and errors are those of ``allreduce``; ``out`` is a list of the same
    length, of arrays that do not overlap.
    """
    outputs = None if out is None else list(out)
    request = (
        _KIND, True, list(arrays), outputs, op, name, process_set,
        algorithm, transport_dtype, 0, None,
    )  # fmt: skip
    plain = library.extension().run(*request)
    return _call(*request[1:-2]).run() if plain is None else plain


def grouped_allreduce_async(
    arrays: Sequence[np.ndarray],
    op: Op = Average,
    out: Sequence[np.ndarray] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    *,
    algorithm: str = "auto",
    transport_dtype: str | None = None,
) -> Handle[list[np.ndarray]]:
    """Start ``grouped_allreduce``; return at once a handle to wait for."""
    outputs = None if out is None else list(out)
    request = (
        _KIND, True, list(arrays), outputs, op, name, process_set,
        algorithm, transport_dtype, 0, None,
    )  # fmt: skip
    plain = start_call(*request)
    return _call(*request[1:-2]).start() if plain is None else plain


def _call(
    grouped: bool,
    arrays: Any,
    out: Any,
    op: Op,
    name: str | None,
    process_set: ProcessSet | None,
    algorithm: str,
    transport_dtype: str | None,
) -> Call[Any]:
    """Return the call if an argument is not plain enough for the extension.

    Args:
        grouped: Whether ``arrays`` and ``out`` are lists.
    """
    if not grouped:
        arrays, out = [arrays], None if out is None else [out]
    sources = [contiguous(array) for array in arrays]
    wanted = [None] * len(sources) if out is None else out
    if len(wanted) != len(sources):
        raise UsageError(
            f"{len(sources)} arrays and {len(wanted)} in out",
            hint="pass one output for each array",
        )
    targets = [
        output(target, source.shape, source.dtype)
        for source, target in zip(sources, wanted, strict=True)
    ]
    if out is not None:
        sources = apart(sources, targets)
    results = targets if out is None else out
    return Call(
        Kind.ALL_REDUCE,
        list(zip(sources, targets, strict=True)),
        results if grouped else results[0],
        process_set=process_set,
        name=name,
        op=op_number(op),
        algorithm=algorithm_number(algorithm),
        transport=transport_number(transport_dtype),
    )
