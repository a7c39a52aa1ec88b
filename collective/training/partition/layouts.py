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
from dataclasses import dataclass, replace
from typing import Any

from collective.training.partition.sizes import AnySize, product, quotient, total

#: Blocks of an axis, at most. More come of a reshape that nothing is won by following.
MOST_BLOCKS = 128

Shape = tuple[AnySize, ...] | None
"""The sizes of a tensor, or None if not even their number is known."""
OpenShape = tuple[AnySize | None, ...] | None
"""The sizes that several tensors share; None for an axis along which they differ."""


@dataclass(frozen=True)
class Replicated:
    """Whole, and equal on every replica."""

    def __repr__(self) -> str:
        return "replicated"


@dataclass(frozen=True)
class SomeRows:
    """Rows that are shared out as such, and are not the rows of the batch.

    Attributes:
        count: How many they are.
        begin, step: Which places of an axis they were cut from: each replica has those of
            its own part. If ``begin`` is None, a replica has as large a part of them as it
            has of the batch.
        per_row: How many places of that axis belong to a row of the batch.
    """

    count: AnySize
    begin: AnySize | None = None
    step: int = 1
    per_row: AnySize = 1

    def __repr__(self) -> str:
        if self.begin is None:
            return f"{self.count} rows"
        return f"{self.count} rows from {self.begin} by {self.step}"


@dataclass(frozen=True)
class Sharded:
    """Each replica has its rows' part of an axis.

    Attributes:
        axis, blocks: See above.
        of: The rows that are shared out, where these are not the rows of the batch.
    """

    axis: int
    blocks: tuple[AnySize, ...] = (1,)
    of: SomeRows | None = None

    @property
    def per_row(self) -> AnySize:
        """Return the places of the axis that belong to a row."""
        return total(self.blocks)

    def moved(self, axis: int) -> Sharded:
        """Return this layout along another axis."""
        return Sharded(axis, self.blocks, self.of)

    def places(self, rows: AnySize) -> AnySize:
        """Return the size of the axis, as it is whole.

        Args:
            rows: The rows of the global batch.
        """
        return self.per_row * (rows if self.of is None else self.of.count)

    def __repr__(self) -> str:
        blocks = "" if self.blocks == (1,) else f", blocks {list(self.blocks)}"
        of = "" if self.of is None else f", of {self.of}"
        return f"sharded(axis {self.axis}{blocks}{of})"


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
    shape: OpenShape = None
    dtype: Any = None
    sizes: Any = None
    is_optional: bool = False  # whether it is no list, but one tensor or none

    def met(self, other: Listed) -> Listed:
        """Return what is true of the elements of both, which lie as those of this one."""
        return replace(
            self,
            shape=shared_shape([self.shape, other.shape]),
            sizes=self.sizes if self.sizes == other.sizes else None,
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


def is_whole(layout: Layout) -> bool:
    """Return whether the value is the same on every replica."""
    if isinstance(layout, Listed):
        return layout.element is None or is_whole(layout.element)
    return isinstance(layout, Replicated)


def lie_alike(a: Layout | None, b: Layout | None) -> bool:
    """Return whether two layouts say the same of replicas, whatever a list holds."""
    if isinstance(a, Listed) and isinstance(b, Listed):
        return lie_alike(a.element, b.element)
    return a == b


def shared_shape(shapes: Sequence[OpenShape]) -> OpenShape:
    """Return what tensors of these shapes share, or None if not even their rank."""
    first = shapes[0]
    if first is None or any(s is None or len(s) != len(first) for s in shapes):
        return None
    of_axes = zip(*(shape for shape in shapes if shape is not None), strict=True)
    return tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in of_axes)


def is_convertible(have: Layout, want: Layout, shape: Shape, rows: AnySize) -> bool:
    """Return whether a value is proved to be one that has the other layout, too.

    This is the precondition of every conversion. A tensor is cut into shares only where
    its axis is known to have as many places as the layout shares out; a length that is
    not known might be another one, as in a branch of a condition.

    Args:
        have: The layout that it is computed in.
        shape: Its whole shape.
        rows: The rows of the global batch.
    """
    if isinstance(have, Listed) or isinstance(want, Listed):
        return _is_list_convertible(have, want, rows)
    if have == want or not isinstance(want, Sharded):
        return True
    if shape is None or len(shape) <= want.axis:
        return False
    return shape[want.axis] == want.places(rows)


def _is_list_convertible(have: Layout, want: Layout, rows: AnySize) -> bool:
    if not isinstance(have, Listed):
        return False
    if is_whole(want):
        return is_whole(have)
    if not isinstance(want, Listed) or have.element is None:
        return isinstance(want, Listed)
    if lie_alike(have, want):
        return True
    # Whole elements are stacked and cut, for which their shape must be known.
    shape, element = have.shape, want.element
    if have.element != WHOLE or shape is None or element is None:
        return False
    known = tuple(size for size in shape if size is not None)
    is_known = len(known) == len(shape) and not isinstance(element, Listed)
    return is_known and is_convertible(WHOLE, element, known, rows)


def reshaped(
    shape: Sequence[AnySize], layout: Sharded, new: Sequence[AnySize], rows: AnySize
) -> Sharded | None:
    """Return the layout after a reshape, or None if there is none.

    Places keep their row-major order, so a sharded axis stays one where what lies before
    it and behind it in memory can be split off evenly.

    Args:
        shape, new: The whole shapes before and after.
        rows: The rows of the global batch.
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
    """Return the runs of an axis with ``before`` places before it, where ``outer`` were."""
    times = quotient(outer, before)
    if isinstance(times, int):
        return runs * times if 0 < times * len(runs) <= MOST_BLOCKS else None
    parts = quotient(before, outer)
    if isinstance(parts, int) and parts and len(runs) % parts == 0:
        part = runs[: len(runs) // parts]
        return part if part * parts == runs else None
    return None
