"""Which reduction a call asks for: Horovod's ``op=`` and its older ``average=``."""

from __future__ import annotations

import warnings
from typing import Final

from collective.operations.kinds import Average, Op


class _Adasum:
    """Adaptive summation, which is no reduction of the core (see ``adasum.py``)."""

    name = "Adasum"

    def __repr__(self) -> str:
        return "Adasum"


Adasum: Final = _Adasum()
Reduction = Op | _Adasum

# Horovod's numbers of its operations, which scripts pass as they are.
_BY_NUMBER: tuple[Reduction, ...] = (
    Op.Average,
    Op.Sum,
    Adasum,
    Op.Min,
    Op.Max,
    Op.Product,
)


def chosen(op: Reduction | int | None = None, average: bool | None = None) -> Reduction:
    """The reduction of a call.

    Args:
        op: Average (also for None), Sum, Adasum, Min, Max or Product; or Horovod's
            number of it.
        average: The old way to say Average or Sum.

    Raises:
        ValueError: If both are given, or ``op`` is no reduction.
    """
    if average is not None:
        if op is not None:
            raise ValueError(
                "The op parameter supersedes average. Please provide only one of them."
            )
        warnings.warn(
            "Parameter `average` has been replaced with `op`",
            DeprecationWarning,
            stacklevel=3,
        )
        return Op.Average if average else Op.Sum
    if op is None:
        return Average
    if type(op) is int and 0 <= op < len(_BY_NUMBER):
        return _BY_NUMBER[op]
    if not isinstance(op, Reduction):
        raise ValueError(
            f"op={op!r} is no reduction\n"
            "HINT: hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max or hvd.Product"
        )
    return op
