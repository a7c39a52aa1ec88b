"""Numbers of the C interface: operations, collectives, algorithms, dtypes."""

from __future__ import annotations

import enum

import numpy as np

from collective.errors import UsageError


class Op(enum.IntEnum):
    """The reduction of the values of the ranks.

    The average of integers is rounded towards zero. For bool, Sum and Max mean
    "or", Min and Product "and".
    """

    Sum = 0
    Average = 1
    Min = 2
    Max = 3
    Product = 4


Sum, Average, Min, Max, Product = Op


class Kind(enum.IntEnum):
    """The kinds of collectives."""

    ALL_REDUCE = 0
    BROADCAST = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_TO_ALL = 4
    BARRIER = 5


def _numbered(*names: str) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


ALGORITHMS = _numbered("auto", "direct", "one-shot", "halving-doubling", "hierarchical")

DTYPES = _numbered(
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "uint8",
    "int32",
    "int64",
    "bool",
)

# The types in which float32 elements may travel.
TRANSPORTS = ("float16", "bfloat16")


def op_number(op: Op) -> int:
    """Return the C interface's number of an operation, or raise a UsageError."""
    try:
        return int(Op(op))
    except ValueError:
        raise UsageError(
            f"there is no operation {op!r}",
            hint=f"choose one of: {', '.join(f'collective.{o.name}' for o in Op)}",
        ) from None


def dtype_number(dtype: np.dtype) -> int:
    """Return the C interface's number of a NumPy dtype, or raise a UsageError."""
    if not dtype.isnative:  # the name does not say so
        raise UsageError(
            f"elements of {dtype.str} are not in this machine's byte order",
            hint='array.astype(array.dtype.newbyteorder("="))',
        )
    try:
        return DTYPES[dtype.name]
    except KeyError:
        raise UsageError(
            f"collectives do not know dtype {dtype.name}",
            hint=f"cast to one of: {', '.join(DTYPES)}",
        ) from None


def algorithm_number(name: str) -> int:
    """Return the C interface's number of an algorithm, or raise a UsageError."""
    try:
        return ALGORITHMS[name]
    except KeyError:
        raise UsageError(
            f"there is no algorithm {name!r}",
            hint=f"choose one of: {', '.join(ALGORITHMS)}",
        ) from None


def transport_number(name: str | None) -> int:
    """Return the C interface's number of a 16-bit transport dtype; -1 for None.

    Raises:
        UsageError: If the dtype is neither float16 nor bfloat16.
    """
    if name is None:
        return -1
    if name not in TRANSPORTS:
        raise UsageError(
            f"transport dtype {name!r}: only 16-bit floats are of use",
            hint="choose float16 or bfloat16, or leave it out",
        )
    return DTYPES[name]
