"""cuDNN's recurrent layers, which Keras takes on GPUs: each row is a sequence of its own.

What cuDNN hands from a forward pass to its backward pass has no meaning, so no layout: it
stays on the replica that made it, as does a partial sum that nothing reads.
"""

from __future__ import annotations

from collective.training.partition.graph import Node
from collective.training.partition.layouts import SUM, WHOLE, Layout, Shape, Sharded
from collective.training.partition.plans import Plan, Rows, rule, summed, whole
from collective.training.partition.rules.empty import with_a_row
from collective.training.partition.values import Shapes, shape_rule

_KEPT = SUM
_INPUT, _PARAMS, _LENGTHS = 0, 3, 4  # of the operands


def _layout(node: Node, layouts: list[Layout], rows: Rows) -> Sharded | None:
    """Return the layout of the sequences if everything else has as many rows."""
    layout = layouts[_INPUT]
    if not isinstance(layout, Sharded) or node.attr("dropout"):
        return None
    if layout.axis != int(node.attr("time_major")):
        return None
    states = node.inputs[1 : 3 if node.attr("rnn_mode") == b"lstm" else 2]
    axes = [(value, layout.axis) for value in states]
    for value, axis in [*axes, (node.inputs[_LENGTHS], 0)]:
        size = None if value.shape is None else value.shape[axis]
        if value.layout != layout.moved(axis) and size != layout.per_row * rows.rows:
            return None
    return layout


def _operands(node: Node, layout: Sharded) -> list[Layout]:
    cell: Layout = layout if node.attr("rnn_mode") == b"lstm" else WHOLE
    return [layout, layout, cell, WHOLE, layout.moved(0)]


@rule("CudnnRNNV3")
def forward(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Compute the outputs of each row, its last states, and what the backward pass reads."""
    layouts = summed(layouts)
    layout = _layout(node, layouts, rows)
    if layout is None:
        return whole(node) if all(lay == WHOLE for lay in layouts) else None
    cell = layout if node.attr("rnn_mode") == b"lstm" else _KEPT
    outputs = [layout, layout, cell, _KEPT, _KEPT]
    return with_a_row(Plan(_operands(node, layout), outputs), node, {_LENGTHS: 1})


@rule("CudnnRNNBackpropV3")
def backward(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Compute the gradients of each row, and the sum over the rows for the weights."""
    kept = node.inputs[-2:]
    if all(value.layout == WHOLE for value in kept):  # made of whole sequences
        return whole(node)
    layout = _layout(node, summed(layouts), rows)
    assert layout is not None, "the forward pass had another layout"
    operands = _operands(node, layout)
    is_lstm = node.attr("rnn_mode") == b"lstm"
    cell: Layout = layout if is_lstm else _KEPT
    of_outputs = [layout, layout, cell]
    of_cell: Layout = layout if is_lstm else _KEPT
    plan = Plan(
        [*operands, *of_outputs, *of_outputs, _KEPT, _KEPT],
        [layout, layout, of_cell, SUM],
    )
    return with_a_row(plan, node, {_LENGTHS: 1})


@shape_rule("CudnnRNNV3")
def _of_forward(node: Node) -> Shapes:
    x, h, c = (value.shape for value in node.inputs[:3])
    if x is None or h is None:
        return None
    both = 2 if node.attr("direction") == b"bidirectional" else 1
    cell: Shape = c if node.attr("rnn_mode") == b"lstm" else None
    return [(*x[:2], h[2] * both), h, cell, None, None]


@shape_rule("CudnnRNNBackpropV3")
def _of_backward(node: Node) -> Shapes:
    return [value.shape for value in node.inputs[:4]]
