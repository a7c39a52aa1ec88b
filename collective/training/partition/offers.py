"""Rows that are not those of the batch: half of them, every second one, all but the first.

What is cut out of the rows of a batch is gathered and whole on each replica. Nothing else
has to be, for a whole tensor is shared out again by a slice, which costs nothing. So such a
tensor, and what is computed of it, has an **offer**: the layout in which it could be had.
Where a product with weights reads it, which is worth more than it costs to exchange what
follows, the offer is taken: each replica computes its part of the product, and of all that
is behind it.

The rows of an offer may be any number of rows (``Sharded.of``). A rule is asked for them as
for those of the batch: it is told that these are the rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from collective.training.partition.graph import Node, Value
from collective.training.partition.layouts import (
    WHOLE,
    Layout,
    Listed,
    Sharded,
    SomeRows,
    is_whole,
)
from collective.training.partition.plans import SOME_RULES, Emit, Plan, Rows, summed
from collective.training.partition.sizes import about, product, quotient
from collective.training.partition.strided import entries, entries_of
from collective.training.partition.values import axis_in

Ask = Callable[[Node, list[Layout], Rows], Plan | None]
"""Asks the rule of a node, and checks what it answers."""

#: Products with weights.
_PRODUCTS = """
    MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum Conv2D Conv3D
    DepthwiseConv2dNative Conv2DBackpropInput Conv3DBackpropInputV2
    DepthwiseConv2dNativeBackpropInput
"""
PRODUCTS = frozenset(_PRODUCTS.split())
#: Elements of weights: with fewer, a product costs less than to exchange its result.
WORTH_SHARING = 1 << 10
# Values that are looked at to find such a product.
_MOST_AHEAD = 200
#: Operations whose result has rows that were put in another order, left out, or joined.
_CUTS = """
    StridedSlice StridedSliceGrad Slice Split SplitV ReverseV2 Roll GatherV2 ConcatV2
    StatelessMultinomial Multinomial RandomShuffle StatelessShuffle TopKV2
"""
CUTS = frozenset(_CUTS.split())


def planned_for_rows(
    node: Node, layouts: list[Layout], rows: Rows, ask: Ask
) -> Plan | None:
    """Return the plan by the rule of a node, or None if none applies.

    Where operands have rows of several numbers, those of one keep their parts, and the
    others are taken whole. Loops and branches take all but those of the batch whole.

    Args:
        layouts: As rules see them.
    """
    others = [lay.of for lay in layouts if isinstance(lay, Sharded)]
    tried = [of for of in dict.fromkeys(others) if of is not None]
    if not tried:
        return ask(node, layouts, rows)
    found = SOME_RULES.get(node.type)
    plan = None if found is None else found(node, layouts, rows)
    if plan is not None:
        return plan
    if node.bodies:
        tried = []
    with_batch = None in others or any(isinstance(lay, Listed) for lay in layouts)
    order: list[SomeRows | None] = [None, *tried] if with_batch else [*tried, None]
    for of in order:
        with _laid_out(node, _only(node.inputs, of)):
            plan = _for_rows(node, [_of(lay, of) for lay in layouts], rows, of, ask)
        if plan is not None:
            return plan
    return None


def _of(layout: Layout, of: SomeRows | None) -> Layout:
    """Return the layout, if it is not of other rows than these: as rules know it."""
    if not isinstance(layout, Sharded):
        return layout
    return dataclasses.replace(layout, of=None) if layout.of == of else WHOLE


def _only(values: Sequence[Value], of: SomeRows | None) -> dict[Value, Layout]:
    return {value: _of(value.layout, of) for value in values}


@contextmanager
def _laid_out(node: Node, layouts: Mapping[Value, Layout]) -> Iterator[None]:
    """Inside, the inputs of a node lie otherwise; rules may look at them."""
    before = {value: value.layout for value in layouts}
    try:
        for value, layout in layouts.items():
            value.layout = layout
        yield
    finally:
        for value, layout in before.items():
            value.layout = layout


def _for_rows(
    node: Node, layouts: list[Layout], rows: Rows, of: SomeRows | None, ask: Ask
) -> Plan | None:
    """Ask a rule as if ``of`` were the number of rows of the batch."""
    if of is None:
        return ask(node, layouts, rows)
    expected = about(of.count, rows.expected)
    told_rows = dataclasses.replace(rows, rows=of.count, expected=expected, some=of)
    plan = ask(node, layouts, told_rows)
    if plan is None or any(isinstance(lay, Listed) for lay in plan.outputs):
        return None

    def told(layout: Layout) -> Layout:
        if isinstance(layout, Sharded) and layout.of is None:
            return dataclasses.replace(layout, of=of)
        return layout

    one = Sharded(0, (1,), of)

    def with_part(emit: Emit | None) -> Emit | None:
        if emit is None:
            return None
        return lambda emission, inputs: emit(emission.of(one), inputs)

    joint = plan.joint
    return dataclasses.replace(
        plan,
        inputs=[layout and told(layout) for layout in plan.inputs],
        outputs=[told(layout) for layout in plan.outputs],
        emit=with_part(plan.emit),
        whole=with_part(plan.whole),
        joint=joint and (lambda emission, x: joint(emission.of(one), x)),
    )


def shared_out(node: Node, rows: Rows, ask: Ask) -> Plan | None:
    """Return the plan of a node that takes an offer, or None; note what it offers itself.

    Args:
        node: A node with a plan.
    """
    if not rows.of_batch or node.bodies or not node.outputs:
        return None
    if any(v.is_nested or v.is_handle for v in node.outputs):
        return None
    if not all(map(is_whole, node.plan.outputs)):
        return None
    plan = _with_offers(node, rows, ask)
    if plan is not None and _is_worth_it(node):
        return plan
    layouts = [WHOLE] * len(node.outputs) if plan is None else plan.outputs
    for value, layout in zip(node.outputs, layouts, strict=True):
        value.offer = layout if isinstance(layout, Sharded) else _cut(node, value, rows)
        if value.offer is not None and not _has_places(value, value.offer, rows):
            value.offer = None
    return None


def _with_offers(node: Node, rows: Rows, ask: Ask) -> Plan | None:
    """Return the plan of a node whose inputs are all whole, if they were had as offered."""
    offered = [value.offer for value in node.inputs if value.offer is not None]
    if not offered or not all(is_whole(value.layout) for value in node.inputs):
        return None
    of = offered[0].of
    as_offered: dict[Value, Layout] = {
        value: WHOLE if value.offer is None else _of(value.offer, of)
        for value in node.inputs
    }
    with _laid_out(node, as_offered):
        layouts = [as_offered[value] for value in node.inputs]
        return _for_rows(node, layouts, rows, of, ask)


def _is_worth_it(node: Node) -> bool:
    """Return whether a node multiplies one offered value with weights, and not with another."""
    others = [value for value in node.inputs if value.offer is None]
    return len(others) == len(node.inputs) - 1 and _multiplies(node, others)


def _multiplies(node: Node, others: Sequence[Value]) -> bool:
    """Return whether a node multiplies with other operands that are large."""
    if node.type not in PRODUCTS:
        return False
    sizes = [about(product(value.shape or ()), None) for value in others]
    return max(sizes, default=0) >= WORTH_SHARING


def leads_to_weights(value: Value, some: SomeRows | None = None) -> bool:
    """Return whether a product with weights reads what is computed of this value alone.

    Rows that are cut out stay where they are, then: nothing is gathered for them. Where
    they meet other rows first, they would be gathered all the same.

    Args:
        some: The rows that it would have. To meet others of them is as good.
    """
    ahead, seen = [value], {value}
    while ahead and len(seen) <= _MOST_AHEAD:
        read = ahead.pop()
        for node in read.users:
            others = [v for v in node.inputs if v not in seen]
            if some is not None and any(_has(v.layout, some) for v in others):
                return True
            if node.bodies or any(v.has_rows for v in others):
                continue
            if _multiplies(node, others):
                return True
            ahead += [v for v in node.outputs if v not in seen]
            seen.update(node.outputs)
    return False


def _has(layout: Layout, some: SomeRows) -> bool:
    return isinstance(layout, Sharded) and layout.of == some


def _has_places(value: Value, offer: Sharded, rows: Rows) -> bool:
    shape = value.shape
    return (
        shape is not None
        and offer.axis < len(shape)
        and shape[offer.axis] == offer.places(rows.rows)
    )


def _cut(node: Node, value: Value, rows: Rows) -> Sharded | None:
    """Return what can be offered of rows that a node has cut out, joined, or put in order."""
    if node.type not in CUTS or value.shape is None:
        return None
    axis = _axis_of_rows(node)
    if axis is None or axis >= len(value.shape):
        return None
    places = value.shape[axis]
    if isinstance(places, int) and places < 2:
        return None
    per_row = quotient(places, rows.rows)
    if isinstance(per_row, int):
        return Sharded(axis, (per_row,))
    return Sharded(axis, (1,), SomeRows(places))


def _axis_of_rows(node: Node) -> int | None:
    """Return the axis of a node's outputs that has rows of the first input that has any."""
    layouts = summed([value.layout for value in node.inputs])
    found = [
        (place, layout if isinstance(layout, Sharded) else value.offer)
        for place, (value, layout) in enumerate(zip(node.inputs, layouts, strict=True))
    ]
    place, layout = next(((i, lay) for i, lay in found if lay is not None), (0, None))
    if layout is None:
        return None
    if node.type == "StridedSlice":
        known = entries_of(node)
        return next((e.out for e in known or () if e.axis == layout.axis), None)
    if node.type == "StridedSliceGrad":
        shape = node.outputs[0].shape
        known = None if shape is None else entries(node, shape, node.inputs[1:4])
        return next((e.axis for e in known or () if e.out == layout.axis), None)
    if node.type == "GatherV2":
        axis = axis_in(node.inputs[2], node.inputs[0].rank)
        of_indices, batch = node.inputs[1].rank, node.attr("batch_dims")
        if axis != layout.axis or place or of_indices != 1 or batch:
            return None
    return layout.axis
