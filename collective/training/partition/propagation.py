"""Propagates the layouts of a step's inputs to everything in the step.

Every node gets a ``Plan``: in which layouts it takes its inputs, which it gives to its
outputs, and how it is made for one replica. A rule (``rules``) makes the plan of a type of
operation. An operation without a rule takes whole inputs and runs whole on every replica:
slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from collective.errors import UsageError
from collective.training.partition.graph import Graph, Node, Value
from collective.training.partition.layouts import (
    MOMENTS,
    OWNED,
    SUM,
    WHOLE,
    Layout,
    Partial,
    Sharded,
    is_convertible,
    is_whole,
)
from collective.training.partition.offers import planned_for_rows, shared_out
from collective.training.partition.plans import (
    AXIS_RULES,
    HANDLE_RULES,
    OWNED_RULES,
    RULES,
    NeedsWholeLists,
    Plan,
    Rows,
)
from collective.training.partition.sizes import (
    agreed,
    product,
)
from collective.training.partition.stateful import may_differ
from collective.training.partition.values import is_constant, learn

# Operations that may hand a partial sum on; it waits for its readers if all are such.
_HAND_ON = frozenset(
    [
        "Mul",
        "RealDiv",
        "DivNoNan",
        "AddV2",
        "Add",
        "AddN",
        "Sub",
        "Neg",
        "Identity",
        "IdentityN",
        "Cast",
        "Reshape",
        "ExpandDims",
        "Squeeze",
        "Transpose",
        "Sum",
        "Mean",
        "ZerosLike",
        "OnesLike",
        "Shape",
        "StopGradient",
        "PreventGradient",
        "Snapshot",
        "ConcatV2",
        "Pack",
        "Slice",
        "StridedSlice",
        "Split",
        "MarkedSum",
    ]
)
_UNREAD = {"Shape", "ZerosLike", "OnesLike"}  # read the shape alone


def propagate(graph: Graph, inputs: Sequence[Layout], rows: Rows) -> None:
    """Find shapes, constants, layouts and plans of all that is in a graph.

    Args:
        inputs: The layout of each input of the graph. The shape of an input that is
            sharded follows from it.
    """
    _lay_out(graph, inputs, rows)
    pull_back(graph, rows)
    if _reduce_pieces(graph):
        _lay_out(graph, inputs, rows)
        pull_back(graph, rows)


def _lay_out(graph: Graph, inputs: Sequence[Layout], rows: Rows) -> None:
    """Lay out as ``propagate`` does, from the inputs on alone."""
    _begin(graph, inputs, rows)
    for node in graph.nodes:
        lay_out(node, rows)
        mark_needed(node)


def _begin(graph: Graph, inputs: Sequence[Layout], rows: Rows) -> None:
    """Give the inputs of a graph their layouts, and note what is computed of rows."""
    for value, layout in zip(graph.inputs, inputs, strict=True):
        value.layout = layout
        value.has_rows = not is_whole(layout)
        _apply_layout(value, rows)
    for node in graph.nodes:
        has_rows = any(value.has_rows for value in node.inputs)
        for value in node.outputs:
            value.has_rows = has_rows


def lay_out(node: Node, rows: Rows) -> None:
    """Plan a node, of whose inputs all is known, and find how its outputs lie."""
    for value in node.outputs:
        value.forget()
        value.is_needed_whole = rows.whole_gradients and value.variable is not None
    learn(node)
    if is_constant(node):
        node.plan = Plan([None] * len(node.inputs), [WHOLE] * len(node.outputs))
    else:
        node.plan = _planned(node, rows)
        node.plan = shared_out(node, rows, _by_rule) or node.plan
    exchanges = _exchanges_before(node)
    for value, layout in zip(node.outputs, node.plan.outputs, strict=True):
        value.layout, value.exchanges = layout, exchanges
        _apply_layout(value, rows)


def mark_needed(node: Node) -> None:
    """Note the sums that a node with a plan needs whole."""
    for value, layout in zip(node.inputs, node.plan.inputs, strict=True):
        if isinstance(value.layout, Partial) and layout not in (None, value.layout):
            value.is_needed_whole = True


def _exchanges_before(node: Node) -> int:
    """Return how many exchanges must come before a node, one after the other."""
    return max(
        (
            value.exchanges + (layout == WHOLE != value.layout)
            for value, layout in zip(node.inputs, node.plan.inputs, strict=True)
            if layout is not None
        ),
        default=0,
    )


def seen(value: Value) -> Layout:
    """Return the layout that a rule sees: sums that someone needs whole are whole.

    A partial sum with several readers is made whole at once; each of them would else
    hand on a sum of its own. So is one of float16, which overflows where the sum of all
    rows does: made of a cast to float32 it would not, and a LossScaleOptimizer would
    make an update that one process skips. In a loop it is not, for that would be an
    exchange in each of its steps.
    """
    layout = value.layout
    if not isinstance(layout, Partial):
        return layout
    if value.is_needed_whole or layout == MOMENTS:
        return WHOLE  # moments have another shape than what they become
    if value.dtype == tf.float16 and not value.is_nested:
        return WHOLE
    readers = [node for node in value.users if node.type not in _UNREAD]
    if layout == SUM and (
        len(readers) > 1 or any(node.type not in _HAND_ON for node in readers)
    ):
        return WHOLE
    return layout


def pull_back(graph: Graph, rows: Rows) -> None:
    """Have a rank compute its piece alone of what is read in pieces alone.

    Such are the gradient's square of an optimizer with sharded slots, and the gradient
    itself, whose sum is then scattered. Where its norm is read, too, the norm is a sum over
    the pieces.
    """
    if not any(OWNED in node.plan.inputs for node in graph.nodes):
        return
    returned, of_sums = set(graph.outputs), _of_sums(graph)
    # Of nodes that end in sums over all elements: how each would work on pieces.
    could: dict[Node, Plan] = {}
    for node in reversed(graph.nodes):
        for value in node.outputs:
            value.is_read_owned = value not in returned and _is_read_owned(
                value, could if value in of_sums else {}
            )
        if node.type == "IdentityN":
            _pull_through(node, returned)
            continue
        plan = _on_pieces(node, rows)
        if plan is None or returned.intersection(node.outputs):
            continue
        (value,) = node.outputs
        if isinstance(plan.outputs[0], Partial):
            could[node] = plan
        elif value.is_read_owned:
            node.plan, value.layout = plan, OWNED
        elif value.users and all(user in could for user in value.users):
            could[node] = plan


def _of_sums(graph: Graph) -> set[Value]:
    """Return the partial sums, and what is computed of them element by element."""
    found: set[Value] = set()
    for node in graph.nodes:
        passes = node.type in OWNED_RULES or node.type == "IdentityN"
        for value in node.outputs:
            if value.layout == SUM or (
                passes
                and any(v in found and v.shape == value.shape for v in node.inputs)
            ):
                found.add(value)
    return found


def _on_pieces(node: Node, rows: Rows) -> Plan | None:
    """Return the plan of a whole node that works on pieces, or None."""
    found = OWNED_RULES.get(node.type)
    if node.is_stateful or len(node.outputs) != 1 or found is None:
        return None
    if not all(lay == WHOLE for lay in (*node.plan.inputs, *node.plan.outputs)):
        return None
    return found(node, [seen(value) for value in node.inputs], rows)


def _take_pieces(node: Node, could: dict[Node, Plan]) -> None:
    """Have a node work on pieces, and the nodes after it up to a sum."""
    plan = could.pop(node, None)
    if plan is None:
        return
    (value,) = node.outputs
    node.plan, value.layout = plan, plan.outputs[0]
    value.is_read_owned = value.layout == OWNED
    value.is_needed_whole = not value.is_read_owned
    if value.is_read_owned:
        for user in value.users:
            _take_pieces(user, could)


_REDUCTIONS = {"Sum", "L2Loss", "Max", "Min", "All", "Any"}


def _reduce_pieces(graph: Graph) -> bool:
    """Have a norm of what ranks read in pieces be a sum over the pieces.

    The norm of a gradient would else be all that keeps the gradient whole.

    Returns:
        Whether some reductions are to be planned again.
    """
    found = False
    for node in graph.nodes:
        if node.type not in _REDUCTIONS or node.in_pieces or not node.inputs:
            continue
        value, (out,) = node.inputs[0], node.outputs
        is_number = out.is_static and product(out.shape or ()) == 1
        if is_number and value.layout == WHOLE and value.is_static and value.rank:
            node.in_pieces = _is_made_for(node, value)
            found = found or node.in_pieces
    return found


def _is_made_for(reader: Node, value: Value) -> bool:
    """Return whether what one node reads whole is made of what others read in pieces."""
    while True:
        others = [node for node in value.users if node is not reader]
        if any(_takes_pieces(node, value) for node in others):
            return True
        made = value.node
        if others or made is None or made.type not in OWNED_RULES or made.is_stateful:
            return False
        alike = [v for v in made.inputs if v.shape == value.shape]
        if len(set(alike)) != 1 or alike[0].layout == OWNED:
            return False
        reader, value = made, alike[0]


def _takes_pieces(node: Node, value: Value) -> bool:
    pairs = zip(node.inputs, node.plan.inputs, strict=True)
    return any(read is value and layout == OWNED for read, layout in pairs)


def _pull_through(node: Node, returned: set[Value]) -> None:
    """Hand on as pieces those tensors of which only pieces, or nothing, is read."""
    layouts = list(node.plan.outputs)
    for place, value in enumerate(node.outputs):
        is_unread = not value.users and value not in returned
        is_array = value.is_static and bool(value.shape) and not value.is_handle
        if layouts[place] == WHOLE and is_array and (is_unread or value.is_read_owned):
            layouts[place] = value.layout = OWNED
    node.plan = Plan(layouts, layouts)


def _is_read_owned(value: Value, could: dict[Node, Plan]) -> bool:
    """Return whether all that read a value take the piece of their rank.

    Args:
        could: Nodes that take it, too, where another one does.
    """
    wanted = [
        (node, layout)
        for node in dict.fromkeys(value.users)
        for read, layout in zip(node.inputs, node.plan.inputs, strict=True)
        if read is value and layout is not None
    ]
    if not any(layout == OWNED for _, layout in wanted):
        return False
    if not all(layout == OWNED or node in could for node, layout in wanted):
        return False
    for node, _ in wanted:
        _take_pieces(node, could)
    return True


def _planned(node: Node, rows: Rows) -> Plan:
    layouts = [seen(value) for value in node.inputs]
    if node.in_pieces:
        layouts[0] = OWNED
    if OWNED in layouts and not node.bodies:
        of_owned = OWNED_RULES.get(node.type)
        plan = None if of_owned is None else of_owned(node, layouts, rows)
        if plan is not None:
            return plan
        if any(v.is_handle and v.layout == OWNED for v in node.inputs):
            raise UsageError(
                f"{node.type} reads or writes a part of a variable of which each rank "
                "stores a piece, and has no rule for pieces",
                hint="drop --shard-optimizer (or shard_weights=True), or take an "
                "optimizer that updates whole variables",
            )
        layouts = [WHOLE if layout == OWNED else layout for layout in layouts]
    if not node.bodies and any(_is_cut_handle(value) for value in node.inputs):
        return _of_handle(node, layouts, rows)
    plan = planned_for_rows(node, layouts, rows, _by_rule)
    if plan is None:
        plan = Plan(
            [WHOLE] * len(node.inputs),
            [WHOLE] * len(node.outputs),
            is_fallback=True,
            is_of_rank_zero=may_differ(node),
        )
    for value, wanted in zip(node.inputs, plan.inputs, strict=True):
        if not _is_given(value, wanted, rows):
            raise NeedsWholeLists(node)
    return plan


def _by_rule(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    for table in (RULES,) if rows.of_batch else (AXIS_RULES, RULES):
        found = table.get(node.type)
        plan = None if found is None else found(node, layouts, rows)
        if plan is not None and _is_possible(plan, node, rows):
            return plan
    return None


def _is_possible(plan: Plan, node: Node, rows: Rows) -> bool:
    """Return whether a node's inputs can be taken as its rule wants them.

    A rule may ask for shares of whatever has as many axes. Here, and nowhere else, what
    is not proved to have the places of its layout is left whole.
    """
    given = zip(node.inputs, plan.inputs, strict=True)
    if not all(_is_given(value, layout, rows) for value, layout in given):
        return False
    made = zip(node.outputs, plan.outputs, strict=True)
    return all(_may_lie(value, layout, rows) for value, layout in made)


def _may_lie(value: Value, layout: Layout, rows: Rows) -> bool:
    """Return whether nothing that is known of an output contradicts its layout."""
    if not isinstance(layout, Sharded) or value.is_handle:
        return True
    if value.shape is None:
        return False
    size = value.shape[layout.axis]
    return agreed([size, layout.places(rows.rows)]) is not None


def _is_given(value: Value, wanted: Layout | None, rows: Rows) -> bool:
    if wanted is None or _is_cut_handle(value):  # which a rule takes as it is
        return True
    return is_convertible(value.layout, wanted, value.shape, rows.rows)


def _is_cut_handle(value: Value) -> bool:
    return value.is_handle and isinstance(value.layout, Sharded)


def _of_handle(node: Node, layouts: list[Layout], rows: Rows) -> Plan:
    """Return the plan of what reads or writes a variable that is cut along an axis."""
    found = HANDLE_RULES.get(node.type)
    plan = None if found is None else found(node, layouts, rows)
    if plan is None:
        name = next(v.source.name for v in node.inputs if _is_cut_handle(v))
        raise UsageError(
            f"{node.op.name} ({node.type}) uses the variable {name}, which is cut over a "
            "model axis, in a way that has no rule",
            hint="leave this variable out of the layout map",
        )
    return plan


def _apply_layout(value: Value, rows: Rows) -> None:
    """Return the size of a sharded axis follows from the layout."""
    layout = value.layout
    if value.is_handle:  # the layout is that of the variable
        return
    if isinstance(layout, Sharded) and value.shape is not None:
        shape = list(value.shape)
        size = agreed([shape[layout.axis], layout.places(rows.rows)])
        if size is None:
            raise ValueError(
                f"the rule of {value.node}: {value} cannot have {layout.per_row} places "
                f"for each row of {rows.rows}"
            )
        shape[layout.axis] = size
        value.shape = tuple(shape)
