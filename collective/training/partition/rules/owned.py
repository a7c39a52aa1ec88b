"""Operations on what each rank has a piece of: the slots of a sharded optimizer.

Elements keep their row-major order in a piece, so whatever treats each alone, and every
reshape, keeps the layout. What is reduced over all elements is a sum over the ranks.
Anything else takes such a value whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from collective.training.keras_compat import tensorflow_names
from collective.training.partition import pieces
from collective.training.partition.graph import Node
from collective.training.partition.layouts import (
    OWNED,
    SUM,
    WHOLE,
    Layout,
    Partial,
)
from collective.training.partition.plans import (
    OWNED_RULES,
    RULES,
    Emit,
    Plan,
    Rows,
    rule,
    whole,
)
from collective.training.partition.rules.elementwise import EACH_ELEMENT
from collective.training.partition.sizes import product
from collective.training.partition.values import axes_in

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission


@rule("ReadVariableOp", table=OWNED_RULES)
def read(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Read the piece of a variable that this process owns."""
    return Plan([OWNED], [OWNED])


@rule("VarIsInitializedOp", table=OWNED_RULES)
def is_initialized(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Return the same on every rank: each has a piece, or none has."""
    return Plan([OWNED], [WHOLE])


@rule("VariableShape", table=OWNED_RULES)
def shape(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Return the shape of the whole variable."""
    sizes = tensorflow_names.shape_of_variable(node.inputs[0].source)
    if sizes is None:
        return None

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return [tf.constant(sizes, node.outputs[0].dtype)]

    return Plan([None], [WHOLE], emit)


@rule("ResourceGather", "ResourceGatherNd", table=OWNED_RULES)
def look_up(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Look up in a table that is joined for it, each replica what its rows ask for."""
    sizes = tensorflow_names.shape_of_variable(node.inputs[0].source)
    found = RULES[node.type](node, [WHOLE, *layouts[1:]], rows)
    if sizes is None or layouts[0] != OWNED:
        return None
    wanted = whole(node) if found is None or found.emit is not None else found

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        piece = tf.raw_ops.ReadVariableOp(
            resource=inputs[0], dtype=node.outputs[0].dtype
        )
        table = emission.pending.joined_at_once(piece, sizes)
        if node.type == "ResourceGatherNd":
            return [tf.gather_nd(table, inputs[1])]
        return [tf.gather(table, inputs[1], batch_dims=node.attr("batch_dims"))]

    return Plan([OWNED, *wanted.inputs[1:]], wanted.outputs, emit)


@rule(
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    table=OWNED_RULES,
)
def write(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Write each rank's piece."""
    if layouts[0] != OWNED or not node.inputs[1].is_static:
        return None
    return Plan([OWNED, OWNED], [])


@rule("ResourceScatterAdd", "ResourceScatterSub", table=OWNED_RULES)
def scatter(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Add rows to a table: of them, the elements that this rank has."""
    indices, updates = node.inputs[1:]
    if indices.rank is None or updates.shape is None or layouts[0] != OWNED:
        return None
    inner = updates.shape[indices.rank :]
    if updates.shape[: indices.rank] != indices.shape:
        return None  # a scalar
    width = product(inner)
    shape = tensorflow_names.shape_of_variable(node.inputs[0].source)
    if shape is None or not isinstance(width, int) or shape[1:] != inner:
        return None

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> tf.Operation:
        handle, rows_read, values = inputs
        part, parts = emission.exchange.place
        sizes = pieces.lengths(shape, parts)
        places = tf.reshape(tf.cast(rows_read, tf.int64), [-1, 1]) * width
        places = tf.reshape(places + tf.range(width, dtype=tf.int64), [-1])
        places -= sum(sizes[:part])
        mine = (places >= 0) & (places < sizes[part])
        flat = tf.reshape(values, [-1])
        kept = [tf.boolean_mask(t, mine) for t in (places, flat)]
        given = [handle, tf.cast(kept[0], indices.dtype), kept[1]]
        return tensorflow_names.copy_operation(node.op, given)

    return Plan([OWNED, WHOLE, WHOLE], [], emit)


@rule(*EACH_ELEMENT, "Select", table=OWNED_RULES)
def each_element(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Work on the pieces; a scalar is one, and what is smaller is broadcast before."""
    out = node.outputs[0]
    if out.is_handle:  # a loop hands it on
        return Plan([OWNED], [OWNED]) if node.type == "Identity" else None
    if not out.is_static or not out.shape:
        return None
    wanted: list[Layout] = []
    for value, layout in zip(node.inputs, layouts, strict=True):
        if not value.is_static:
            return None
        if value.shape == out.shape:
            wanted.append(OWNED)
        elif layout == OWNED or (node.type == "Select" and value.rank):
            return None
        else:
            wanted.append(WHOLE)
    if OWNED not in wanted:
        return None

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        given = []
        for value, layout, x in zip(node.inputs, wanted, inputs, strict=True):
            if layout == WHOLE:
                if product(value.shape or ()) == 1:
                    x = tf.reshape(x, [])
                else:
                    x = pieces.cut(
                        tf.broadcast_to(x, out.shape), *emission.exchange.place
                    )
            given.append(x)
        return emission.copy(node, given)

    return Plan(wanted, [OWNED], emit)


@rule("Reshape", "ExpandDims", "Squeeze", "EnsureShape", table=OWNED_RULES)
def reshape(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Keep the order of the elements."""
    if not node.inputs[0].is_static or not node.outputs[0].is_static:
        return None

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return [tf.identity(inputs[0])]

    return Plan([OWNED, *[None] * (len(layouts) - 1)], [OWNED], emit)


_KINDS = {
    "Sum": ("sum", tf.reduce_sum),
    "Mean": ("sum", tf.reduce_sum),
    "Max": ("max", tf.reduce_max),
    "Min": ("min", tf.reduce_min),
    "All": ("all", tf.reduce_all),
    "Any": ("any", tf.reduce_any),
}


@rule(*_KINDS, "L2Loss", table=OWNED_RULES)
def reduction(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Reduce over all elements; each rank has a partial result."""
    x, out = node.inputs[0], node.outputs[0]
    if not x.is_static or not out.is_static or product(out.shape or ()) != 1:
        return None
    if node.type == "L2Loss":
        return Plan([OWNED], [SUM], _once(lambda piece: tf.nn.l2_loss(piece)))
    if axes_in(node.inputs[1], x.rank) is None:
        return None
    count = int(np.prod(np.array(x.shape)))
    if node.type == "Mean" and not x.dtype.is_floating:
        return None
    kind, reduce = _KINDS[node.type]

    def of_piece(piece: tf.Tensor) -> tf.Tensor:
        found = tf.reshape(reduce(piece), out.shape)
        return found / count if node.type == "Mean" else found

    return Plan([OWNED, None], [Partial(kind)], _once(of_piece, kind == "sum"))


def _once(of_piece: Callable[[tf.Tensor], tf.Tensor], is_sum: bool = True) -> Emit:
    """Let the first replica of a process alone add the process's result."""

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        found = of_piece(inputs[0])
        return [tf.zeros_like(found) if is_sum and emission.replica else found]

    return emit
