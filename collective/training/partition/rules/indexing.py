"""Look-ups: each replica looks up what its rows ask for."""

from __future__ import annotations

from collective.training.partition.graph import Node
from collective.training.partition.layouts import SUM, WHOLE, Layout, Sharded
from collective.training.partition.plans import Plan, Rows, rule, summed, whole
from collective.training.partition.rules.empty import with_a_row
from collective.training.partition.values import axis_in


@rule("ResourceGather")
def look_up(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Look rows of a variable up."""
    layouts = summed(layouts)
    if not isinstance(layouts[1], Sharded) or node.attr("batch_dims"):
        return whole(node) if layouts[1] == WHOLE else None
    return Plan([WHOLE, layouts[1]], [layouts[1]])


@rule("ResourceGatherNd")
def look_up_nd(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Take elements of a variable."""
    layout, rank = summed(layouts)[1], node.inputs[1].rank
    if not isinstance(layout, Sharded):
        return whole(node)
    if rank is None or layout.axis >= rank - 1:
        return None
    return Plan([WHOLE, layout], [layout])


@rule("GatherV2", "Gather")
def gather(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Take places of an axis, by number."""
    layouts = summed(layouts)
    (x, indices), rest = node.inputs[:2], [WHOLE] * (len(layouts) - 2)
    axis, batch = 0, 0
    if node.type == "GatherV2":
        found = axis_in(node.inputs[2], x.rank)
        if found is None or indices.rank is None:
            return whole(node) if all(lay == WHOLE for lay in layouts) else None
        axis, batch = found, node.attr("batch_dims")
        batch = batch + indices.rank if batch < 0 else batch
    if x.rank is None or indices.rank is None:
        return whole(node) if all(lay == WHOLE for lay in layouts) else None
    table, numbers = layouts[:2]
    size = None
    for layout in (table, numbers):
        if isinstance(layout, Sharded) and layout.axis < batch:
            size = layout.per_row * rows.rows
            for value in (x, indices):
                assert value.shape is not None
                if value.layout != layout and value.shape[layout.axis] != size:
                    return None
            return Plan([layout, layout, *rest], [layout])
    if isinstance(table, Sharded) and table.axis != axis:
        ahead = table.axis < axis
        made = table.axis if ahead else table.axis - 1 + indices.rank - batch
        return Plan([table, WHOLE, *rest], [table.moved(made)])
    is_moved = isinstance(table, Sharded) and numbers == WHOLE and not batch
    if is_moved and indices.shape and indices.shape[0] == rows.rows:
        # There are as many numbers as rows: each replica looks up its own.
        numbers = Sharded(0)
    if isinstance(numbers, Sharded):
        return Plan(
            [WHOLE, numbers, *rest], [numbers.moved(axis + numbers.axis - batch)]
        )
    return whole(node) if all(lay == WHOLE for lay in layouts) else None


@rule("GatherNd")
def gather_nd(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Take elements by their indices."""
    layouts, rank = summed(layouts), node.inputs[1].rank
    if not isinstance(layouts[1], Sharded):
        return whole(node) if layouts[0] == WHOLE else None
    if rank is None or layouts[1].axis >= rank - 1:
        return None
    return Plan([WHOLE, layouts[1], *[WHOLE] * (len(layouts) - 2)], [layouts[1]])


@rule("ScatterNd")
def scatter_nd(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Add rows to zeros: the gradient of ``GatherNd``, and counts."""
    indices, updates = node.inputs[:2]
    layouts = summed(layouts)
    found = [lay for lay in layouts[:2] if isinstance(lay, Sharded)]
    if not found:
        return whole(node)
    if indices.rank is None or found[0].axis >= indices.rank - 1:
        return None
    if layouts[2] != WHOLE or not (
        updates.dtype.is_floating or updates.dtype.is_integer
    ):
        return None
    return Plan([found[0], found[0], WHOLE], [SUM])


@rule("OneHot")
def one_hot(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Add a new axis for the numbers."""
    layouts, axis = summed(layouts), node.attr("axis")
    layout, rank = layouts[0], node.inputs[0].rank
    if not isinstance(layout, Sharded):
        return whole(node) if all(lay == WHOLE for lay in layouts) else None
    if rank is None or any(lay != WHOLE for lay in layouts[1:]):
        return None
    axis = rank if axis == -1 else axis
    return Plan(
        [layout, WHOLE, WHOLE, WHOLE],
        [layout.moved(layout.axis + (layout.axis >= axis))],
    )


@rule("SearchSorted", "LowerBound", "UpperBound")
def bounds(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Find where numbers lie in sorted rows."""
    layouts = summed(layouts)
    layout = next((lay for lay in layouts if isinstance(lay, Sharded)), None)
    if layout is None:
        return whole(node)
    if layout.axis == 1:
        return Plan([WHOLE, layout], [layout]) if layouts[1] == layout else None
    if any(
        v.shape is None or v.shape[0] != layout.per_row * rows.rows for v in node.inputs
    ):
        return None
    return Plan([layout, layout], [layout])


@rule("Bucketize")
def bucketize(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Find the bucket of each number alone."""
    (layout,) = summed(layouts)
    return Plan([layout], [layout])


@rule("TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub")
def tensor_scatter(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Write places of a table; whole where rows write to any of them."""
    layouts = summed(layouts)
    table, rank = layouts[0], node.inputs[1].rank
    width = None if node.inputs[1].shape is None else node.inputs[1].shape[-1]
    if table == WHOLE and isinstance(width, int) and rank is not None:
        table = _as_written(node, layouts[2], width - rank + 1, rows)
    if not isinstance(table, Sharded):
        return whole(node) if all(lay == WHOLE for lay in layouts) else None
    if rank is None or not isinstance(width, int) or table.axis < width:
        return None
    updates = table.moved(table.axis - width + rank - 1)
    return with_a_row(Plan([table, WHOLE, updates], [table]), node)


def _as_written(node: Node, updates: Layout, behind: int, rows: Rows) -> Layout:
    """Return the layout of a whole table of which rows are written; whole if it has none.

    Args:
        behind: How many axes further behind the same axis of the table is.
    """
    shape = node.inputs[0].shape
    if not isinstance(updates, Sharded) or shape is None:
        return WHOLE
    found = updates.moved(updates.axis + behind)
    is_long = 0 <= found.axis < len(shape) and (
        shape[found.axis] == found.per_row * rows.rows
    )
    return found if is_long else WHOLE
