"""How a tensor lies over replicas, and how a reshape changes that.

    Replicated             whole, and equal on every replica
    Sharded(axis, blocks)  each replica has its rows' part of one axis
    Partial(kind)          the value is the sum (maximum, ...) over replicas
    Listed(element)        a list of tensors that each have a layout
    Owned()                each process has a piece of the flat tensor, whatever its rows

An axis that is sharded has ``sum(blocks) * rows`` places: one block behind the other, as
after a concatenation of batches. Of each block ``k`` a replica has the ``k * own``
consecutive places of its own rows.

Source: Y. Xu et al., GSPMD: General and Scalable Parallelization for ML Computation
Graphs, 2021 (arXiv:2105.04663), whose names of layouts differ: tiled, replicated, partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from collective.training.partition.sizes import AnySize, product, quotient, total

#: Blocks of an axis, at most. More come of a reshape that nothing is won by following.
MOST_BLOCKS = 128

Shape = tuple[AnySize, ...] | None
"""The sizes of a tensor, or None if not even their number is known."""


@dataclass(frozen=True)
class Replicated:
    """Whole, and equal on every replica."""

    def __repr__(self) -> str:
        return "replicated"


@dataclass(frozen=True)
class Sharded:
    """Each replica has its rows' part of an axis."""

    axis: int
    blocks: tuple[AnySize, ...] = (1,)

    @property
    def per_row(self) -> AnySize:
        """Places of the axis that belong to a row."""
        return total(self.blocks)

    def moved(self, axis: int) -> Sharded:
        """Returns this layout along another axis."""
        return Sharded(axis, self.blocks)

    def __repr__(self) -> str:
        blocks = "" if self.blocks == (1,) else f", blocks {list(self.blocks)}"
        return f"sharded(axis {self.axis}{blocks})"


@dataclass(frozen=True)
class Partial:
    """The value is what ``kind`` makes of the values of all replicas."""

    kind: str = "sum"  # sum, max, min, prod, any, all; moments

    def __repr__(self) -> str:
        return f"partial({self.kind})"


@dataclass(frozen=True)
class Listed:
    """A list of tensors; ``element`` is None while nothing was put into it."""

    element: Layout | None = None
    # What all elements share: the whole shape, the dtype, and the sizes
    # that they hold (``Value.sizes``).
    shape: Shape = None
    dtype: Any = None
    sizes: Any = None

    def met(self, other: Listed) -> Listed:
        """What is true of the elements of both, which lie as those of this one."""
        return Listed(
            self.element,
            self.shape if self.shape == other.shape else None,
            self.dtype,
            self.sizes if self.sizes == other.sizes else None,
        )

    def __repr__(self) -> str:
        return f"list of {self.element}"


@dataclass(frozen=True)
class Owned:
    """Each process has a piece of the flat tensor: state that is not held by all.

    The pieces follow from the number of elements and the ranks alone (``pieces``). A
    variable of which a rank stores its piece has a handle of this layout.
    """

    def __repr__(self) -> str:
        return "owned"


Layout = Replicated | Sharded | Partial | Listed | Owned

WHOLE = Replicated()
OWNED = Owned()
SUM = Partial("sum")
MOMENTS = Partial("moments")  # see rules/moments.py
ROWS = Sharded(0)


def reshaped(
    shape: Sequence[AnySize], layout: Sharded, new: Sequence[AnySize], rows: AnySize
) -> Sharded | None:
    """Returns the layout after a reshape, or None if there is none.

    Places keep their row-major order, so a sharded axis stays one where what lies before
    it and behind it in memory can be split off evenly.

    Args:
        shape, new: The whole shapes before and after.
        rows: Of the global batch.
    """
    outer, inner = product(shape[: layout.axis]), product(shape[layout.axis + 1 :])
    for axis, size in enumerate(new):
        if size == layout.per_row * rows and product(new[:axis]) == outer:
            return layout.moved(axis)  # what lies behind is as much as before
    runs = [k * inner for k in layout.blocks]  # elements of a row, run by run
    for axis, size in enumerate(new):
        before, behind = product(new[:axis]), product(new[axis + 1 :])
        spread = _spread(runs, outer, before)
        if spread is None:
            continue
        blocks = [quotient(run, behind) for run in spread]
        if any(k is None for k in blocks):
            continue
        found = Sharded(axis, tuple(k for k in blocks if k is not None))
        if found.per_row * rows == size:
            return found
    return None


def _spread(
    runs: list[AnySize], outer: AnySize, before: AnySize
) -> list[AnySize] | None:
    """The runs of an axis with ``before`` places in front of it, where ``outer`` were."""
    times = quotient(outer, before)
    if isinstance(times, int):
        return runs * times if 0 < times * len(runs) <= MOST_BLOCKS else None
    parts = quotient(before, outer)
    if isinstance(parts, int) and parts and len(runs) % parts == 0:
        part = runs[: len(runs) // parts]
        return part if part * parts == runs else None
    return None
