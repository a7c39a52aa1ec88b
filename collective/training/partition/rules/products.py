"""Products of matrices: a contraction over the rows is a sum over the replicas."""

from __future__ import annotations

from collections.abc import Sequence

from collective.training.partition.graph import Node, Value
from collective.training.partition.layouts import SUM, WHOLE, Layout, Sharded
from collective.training.partition.plans import Plan, Rows, rule, summed, whole
from collective.training.partition.sizes import product
from collective.training.partition.whole_shapes import labels_of


def contraction(
    node: Node,
    layouts: Sequence[Layout],
    rows: Rows,
    labels: Sequence[str],
    out: str,
    *,
    repeated: str = "",
) -> Plan | None:
    """Return the plan of a sum over products.

    Args:
        labels: For each input, a letter for each axis.
        out: The letters of the result. Other letters are summed over.
        repeated: The letters of axes along which an operand of size 1 is repeated.
    """
    return contracted(node.inputs, layouts, rows, labels, out, repeated=repeated)


def contracted(
    values: Sequence[Value],
    layouts: Sequence[Layout],
    rows: Rows,
    labels: Sequence[str],
    out: str,
    *,
    repeated: str = "",
) -> Plan | None:
    """Return the plan of a sum over products of values; see ``contraction``."""
    layouts = summed(layouts)
    found = [
        (labels[i][lay.axis], lay, len(labels[i]), _elements(values[i]))
        for i, lay in enumerate(layouts)
        if isinstance(lay, Sharded)
    ]
    if not found:
        return Plan([WHOLE] * len(values), [WHOLE])
    # If the two differ, take the one that stays in the result: nothing is summed then.
    # If both do, the other is gathered: the one with fewer elements.
    found.sort(key=lambda entry: (entry[0] not in out, -entry[2], -entry[3]))
    letter, layout, *_ = found[0]
    size = layout.per_row * rows.rows
    wanted: list[Layout] = []
    for value, have, label in zip(values, layouts, labels, strict=True):
        axis = label.find(letter)
        if axis < 0:
            wanted.append(WHOLE)
            continue
        want: Layout | None = layout.moved(axis)
        if have != want:
            own = None if value.shape is None else value.shape[axis]
            if own != size:
                want = WHOLE if own == 1 and letter in repeated else None
        if want is None:
            return None
        wanted.append(want)
    made = layout.moved(out.index(letter)) if letter in out else SUM
    return Plan(wanted, [made])


_TYPICAL = 32  # of an unknown size


def _elements(value: Value) -> int:
    """Return about how many elements a value has."""
    size = product(value.shape or ())
    if isinstance(size, int):
        return size
    return sum(f * _TYPICAL ** len(term) for term, f in size.terms.items())


@rule("MatMul")
def matmul(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Multiply two matrices."""
    a = "ki" if node.attr("transpose_a") else "ik"
    b = "jk" if node.attr("transpose_b") else "kj"
    return contraction(node, layouts, rows, [a, b], "ij")


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def batch_matmul(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Multiply stacks of matrices, which broadcast."""
    of_a, of_b = (value.rank for value in node.inputs)
    if of_a is None or of_b is None or max(of_a, of_b) > 10:
        return None
    most = max(of_a, of_b) - 2
    batch = "abcdefgh"[:most]
    a = "ki" if node.attr("adj_x") else "ik"
    b = "jk" if node.attr("adj_y") else "kj"
    labels = [batch[most + 2 - of_a :] + a, batch[most + 2 - of_b :] + b]
    return contraction(node, layouts, rows, labels, batch + "ij", repeated=batch)


@rule("Einsum")
def einsum(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Contract as an equation says."""
    found = labels_of(node)
    if found is None:
        return None
    labels, out = found
    if any(len(set(label)) != len(label) for label in labels):
        return None
    named = node.attr("equation").decode()
    dots = "".join(letter for letter in out if letter not in named)
    return contraction(node, layouts, rows, labels, out, repeated=dots)


@rule("SparseTensorDenseMatMul")
def sparse_matmul(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Multiply a sparse matrix that is whole by the columns of a dense one."""
    layouts = summed(layouts)
    layout = layouts[3]
    if not isinstance(layout, Sharded):
        return whole(node) if all(lay == WHOLE for lay in layouts) else None
    columns = 0 if node.attr("adjoint_b") else 1
    if layout.axis != columns:
        return None
    return Plan([WHOLE, WHOLE, WHOLE, layout], [layout.moved(1)])
