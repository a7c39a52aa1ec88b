"""Diagonals and bands: of a matrix for each row, or of one matrix of all rows.

A matrix of all pairs of rows has ``[n, n]`` places and is sharded along one of both axes.
A replica then has some rows (or columns) of the matrix, and knows their numbers: where the
diagonal runs through its part is computed from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import tensorflow as tf

from collective.training.partition.graph import Node, Value, sizes_in
from collective.training.partition.layouts import WHOLE, Layout, Shape, Sharded
from collective.training.partition.plans import Emit, Plan, Rows, rule, summed, whole
from collective.training.partition.shares import pieces_of, sliced
from collective.training.partition.values import Shapes, alike, shape_rule

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission

_MAKE = ("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3")
_TAKE = ("MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3")
_SET = ("MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3")

Compute: TypeAlias = (
    "Callable[[Emission, list[tf.Tensor], tf.Tensor, tf.Tensor], tf.Tensor]"
)
"""Of the emission, the inputs, and the row and column of each place of a part."""


def _is_main(node: Node, place: int) -> bool:
    """Return whether it is the main diagonal; an operation's first version has no other."""
    if node.type in ("MatrixDiag", "MatrixDiagPart", "MatrixSetDiag"):
        return True
    number = node.inputs[place].const
    return number is not None and not number.any() and number.size in (1, 2)


def _is_square(value: Value) -> bool:
    shape = value.shape
    return shape is not None and len(shape) > 1 and shape[-1] == shape[-2]


def _makes_square(node: Node) -> bool:
    """Return whether a matrix is made that has no place but those beside its diagonal."""
    if node.type == "MatrixDiag":
        return True
    shape = node.inputs[0].shape
    sizes = [sizes_in(value) for value in node.inputs[2:4]]
    return (
        _is_main(node, 1)
        and bool(shape)
        and all(size == -1 or (shape and size == shape[-1]) for size in sizes)
    )


def _axes_of_diagonal(node: Node) -> int | None:
    """Return how many of the last axes are of one matrix: two for several diagonals."""
    if node.type == "MatrixDiag":
        return 1
    which = node.inputs[1].const
    return None if which is None else 1 + int(which.min() != which.max())


@shape_rule(*_MAKE)
def _made(node: Node) -> Shapes:
    shape, axes = node.inputs[0].shape, _axes_of_diagonal(node)
    if not shape or axes is None:
        return None
    if _makes_square(node):
        return (*shape, shape[-1])
    return (*shape[:-axes], None, None)


@shape_rule(*_TAKE)
def _taken(node: Node) -> Shape:
    shape = node.inputs[0].shape
    if shape is None or not _is_square(node.inputs[0]):
        return None
    if _is_main(node, 1):
        return shape[:-1]
    which = node.inputs[1].const
    if which is None or which.min() != which.max():
        return None
    return (*shape[:-2], shape[-1] - abs(int(which.min())))


alike("MatrixBandPart", *_SET)


def _numbers(
    emission: Emission, layout: Sharded, size: Any, rank: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the row and the column of each place of a replica's part of a square matrix.

    Args:
        size: Of the matrix.
        rank: The rank of the tensor of matrices.
    """
    own = tf.concat(
        [
            tf.range(emission.number(begin), emission.number(begin + count))
            for begin, count in pieces_of(emission, layout)
        ],
        0,
    )
    every = tf.range(emission.number(size))
    if layout.axis == rank - 2:
        return own[:, None], every[None]
    return every[:, None], own[None]


def _beside(diagonal: tf.Tensor, by_rows: bool) -> tf.Tensor:
    """Return a diagonal along the rows of matrices, or along their columns."""
    return diagonal[..., None] if by_rows else diagonal[..., None, :]


def _across(
    node: Node,
    value: Value,
    layouts: list[Layout],
    made: Sharded,
    of_matrix: Sharded,
    compute: Compute,
) -> Plan | None:
    """Return the plan of an operation on a square matrix that lies as ``of_matrix``."""
    shape = value.shape
    assert shape is not None
    size, rank = shape[-1], len(shape)

    def emit(emission: Emission, x: list[tf.Tensor]) -> list[tf.Tensor]:
        return [compute(emission, x, *_numbers(emission, of_matrix, size, rank))]

    return Plan(layouts, [made], emit)


@rule("MatrixBandPart")
def band(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Write zeros outside of a band around the diagonal."""
    layout, x = summed(layouts)[0], node.inputs[0]
    if not isinstance(layout, Sharded):
        return whole(node)
    if x.rank is None:
        return None
    wanted: list[Layout] = [layout, WHOLE, WHOLE]
    if layout.axis < x.rank - 2:
        return Plan(wanted, [layout])
    if not _is_square(x):
        return None

    def compute(
        emission: Emission, given: list[tf.Tensor], row: tf.Tensor, column: tf.Tensor
    ) -> tf.Tensor:
        matrix, lower, upper = given
        lower, upper = tf.cast(lower, tf.int64), tf.cast(upper, tf.int64)
        inside = ((lower < 0) | (row - column <= lower)) & (
            (upper < 0) | (column - row <= upper)
        )
        return tf.where(inside, matrix, tf.zeros([], matrix.dtype))

    return _across(node, x, wanted, layout, layout, compute)


@rule(*_TAKE)
def take(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Take the diagonals of matrices."""
    layouts = summed(layouts)
    layout, x = layouts[0], node.inputs[0]
    if not isinstance(layout, Sharded):
        return whole(node) if all(lay == WHOLE for lay in layouts) else None
    if x.rank is None:
        return None
    wanted: list[Layout] = [layout, *[WHOLE] * (len(layouts) - 1)]
    if layout.axis < x.rank - 2:
        return Plan(wanted, [layout])
    if not (_is_square(x) and _is_main(node, 1)) or x.dtype == tf.bool:
        return None
    other = -1 if layout.axis == x.rank - 2 else -2

    def compute(
        emission: Emission, given: list[tf.Tensor], row: tf.Tensor, column: tf.Tensor
    ) -> tf.Tensor:
        matrix = given[0]
        there = tf.where(row == column, matrix, tf.zeros([], matrix.dtype))
        return tf.reduce_sum(there, other)

    return _across(node, x, wanted, layout.moved(x.rank - 2), layout, compute)


@rule(*_MAKE)
def make(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Make matrices of their diagonals; each replica makes its part of a whole one, too."""
    layouts = summed(layouts)
    layout, x, out = layouts[0], node.inputs[0], node.outputs[0]
    rest: list[Layout] = [WHOLE] * (len(layouts) - 1)
    is_square = x.rank is not None and _makes_square(node) and out.shape is not None

    def compute(
        emission: Emission, given: list[tf.Tensor], row: tf.Tensor, column: tf.Tensor
    ) -> tf.Tensor:
        return made(given, True, row, column)

    def made(
        given: list[tf.Tensor], by_rows: bool, row: tf.Tensor, column: tf.Tensor
    ) -> tf.Tensor:
        along = _beside(given[0], by_rows)
        around = given[4] if len(given) > 4 else tf.zeros([], along.dtype)
        return tf.where(row == column, along, around)

    if isinstance(layout, Sharded):
        axes = _axes_of_diagonal(node)
        if x.rank is None or axes is None:
            return None
        if layout.axis < x.rank - axes:
            return Plan([layout, *rest], [layout])
        if not is_square:
            return None
        return _across(node, out, [layout, *rest], layout, layout, compute)
    if any(lay != WHOLE for lay in layouts):
        return None

    def share(emission: Emission, wanted: Sharded) -> tf.Tensor | None:
        rank = len(out.shape or ())
        if not is_square or wanted.axis < rank - 2:
            return None
        given = [emission.whole_of(value) for value in node.inputs]
        if given[0] is None:
            return None
        parts = pieces_of(emission, wanted)
        own = [
            given[0][..., emission.number(begin) : emission.number(begin + count)]
            for begin, count in parts
        ]
        given[0] = own[0] if len(own) == 1 else tf.concat(own, -1)
        assert out.shape is not None
        numbers = _numbers(emission, wanted, out.shape[-1], rank)
        return made(given, wanted.axis == rank - 2, *numbers)

    return Plan([WHOLE, *rest], [WHOLE], share=share)


@rule(*_SET)
def put(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Give matrices other diagonals."""
    layouts = summed(layouts)
    if all(lay == WHOLE for lay in layouts):
        return whole(node)
    x, (of_matrix, of_diagonal, *_) = node.inputs[0], layouts
    layout = of_matrix if isinstance(of_matrix, Sharded) else of_diagonal
    if x.rank is None or x.shape is None or not isinstance(layout, Sharded):
        return None
    if layout.axis < x.rank - 2 or not _is_main(node, 2):
        return _row_by_row(node, layouts)
    along = layout.moved(x.rank - 2)
    size = layout.per_row * rows.rows
    if not _is_square(x) or x.shape[layout.axis] != size:
        return None
    # Nothing may be known of a diagonal of zeros, in a gradient: it is taken as it is.
    is_whole = of_diagonal == WHOLE
    taken: Layout = WHOLE if is_whole else along
    wanted: list[Layout] = [layout, taken, *[WHOLE] * (len(layouts) - 2)]
    by_rows = layout.axis == along.axis

    def compute(
        emission: Emission, given: list[tf.Tensor], row: tf.Tensor, column: tf.Tensor
    ) -> tf.Tensor:
        matrix, diagonal = given[:2]
        if is_whole:
            own = tf.reshape(row if by_rows else column, [-1])
            diagonal = tf.ensure_shape(diagonal, [None] * (matrix.shape.rank - 1))
            diagonal = tf.gather(diagonal, own, axis=-1)
        return tf.where(row == column, _beside(diagonal, by_rows), matrix)

    return _across(node, x, wanted, layout, layout, compute)


def _put_in_matrices(node: Node) -> Emit:
    """Set diagonals without telling TensorFlow their rank.

    It refuses several diagonals of matrices of whose number it knows nothing, as of those
    of a share: it takes their rank for that of one diagonal.
    """

    def emit(emission: Emission, x: list[tf.Tensor]) -> list[tf.Tensor]:
        diagonals = tf.raw_ops.PlaceholderWithDefault(input=x[1], shape=None)
        return list(emission.copy(node, [x[0], diagonals, *x[2:]]))

    return emit


def _row_by_row(node: Node, layouts: list[Layout]) -> Plan | None:
    """Make the matrix of each row alone."""
    found = [lay for lay in layouts[:2] if isinstance(lay, Sharded)]
    rank = node.inputs[0].rank
    if rank is None or not found or found[0].axis >= rank - 2:
        return None
    layout, rest = found[0], [WHOLE] * (len(layouts) - 2)
    if node.inputs[1].rank is not None:
        return Plan([layout, layout, *rest], [layout], _put_in_matrices(node))
    if not _is_main(node, 2):
        return None

    def emit(emission: Emission, x: list[tf.Tensor]) -> list[tf.Tensor]:
        diagonals = tf.ensure_shape(x[1], [None] * (rank - 1))
        own = sliced(emission, diagonals, layout)
        return emission.copy(node, [x[0], own, *x[2:]])

    return Plan([layout, WHOLE, *rest], [layout], emit)
