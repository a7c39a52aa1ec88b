"""Variables that are cut along an axis: each replica has a part of the variable itself.

The handle of such a variable has the layout of the variable. Look-ups by number in a table
that is cut by its rows are a sum over the replicas, to which those add zeros that do not
have the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.keras_compat import tensorflow_names
from collective.training.partition.graph import Node
from collective.training.partition.layouts import SUM, WHOLE, Layout, Sharded
from collective.training.partition.plans import HANDLE_RULES, Plan, Rows, rule
from collective.training.partition.shares import pieces_of

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission


@rule("ReadVariableOp", "Identity", table=HANDLE_RULES)
def read(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Read this replica's part."""
    return Plan(layouts, layouts)


@rule("VarIsInitializedOp", table=HANDLE_RULES)
def is_initialized(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Return the same on every replica: each has a part, or none has."""
    return Plan(layouts, [WHOLE])


@rule("VariableShape", table=HANDLE_RULES)
def shape(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Return the shape of the whole variable."""
    sizes = tensorflow_names.shape_of_variable(node.inputs[0].source)
    if sizes is None:
        return None

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return [emission.vector(sizes, node.outputs[0].dtype)]

    return Plan([None], [WHOLE], emit)


@rule(
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    table=HANDLE_RULES,
)
def write(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Write each replica's part."""
    if not isinstance(layouts[0], Sharded):
        return None
    return Plan([layouts[0], layouts[0]], [])


@rule("ResourceGather", table=HANDLE_RULES)
def look_up(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Look rows of a table up."""
    table, rank = layouts[0], node.inputs[1].rank
    if not isinstance(table, Sharded) or rank is None or node.attr("batch_dims"):
        return None
    if table.axis:
        return Plan([table, WHOLE], [table.moved(table.axis - 1 + rank)])
    return looked_up(node, table, [table, WHOLE])


def looked_up(node: Node, table: Sharded, wanted: list[Layout | None]) -> Plan | None:
    """Return the plan of a look-up, by operand 1, in a table that is cut by its rows."""
    if len(table.blocks) > 1 or not is_number(node.outputs[0].dtype):
        return None

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        numbers, is_mine = own_numbers(emission, table, inputs[1])
        found = emission.copy(node, [inputs[0], numbers, *inputs[2:]])[0]
        behind = len(found.shape) - len(is_mine.shape)
        ones = tf.ones([behind], tf.int32)
        is_mine = tf.reshape(is_mine, tf.concat([tf.shape(is_mine), ones], 0))
        return [tf.where(is_mine, found, tf.zeros([], found.dtype))]

    return Plan(wanted, [SUM], emit)


def own_numbers(
    emission: Emission, table: Sharded, numbers: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the rows of a table by their number in a replica's part, and whether it has them.

    Returns:
        The number is 0 of a row that it does not have, and -1 of one that nobody has,
        which the operation refuses.
    """
    ((first, count),) = pieces_of(emission, table)
    size = emission.scalar(table.per_row * emission.rows, numbers.dtype)
    local = numbers - emission.scalar(first, numbers.dtype)
    is_mine = (local >= 0) & (local < emission.scalar(count, numbers.dtype))
    nobodys = tf.cast((numbers < 0) | (numbers >= size), numbers.dtype)
    return tf.where(is_mine, local, -nobodys), is_mine


def is_number(dtype: tf.DType) -> bool:
    """Return whether values of a dtype can be added to zeros."""
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_complex)


@rule(
    "ResourceScatterAdd",
    "ResourceScatterSub",
    "ResourceScatterUpdate",
    table=HANDLE_RULES,
)
def scatter(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Add rows to a table, or write them."""
    (table, *_), (_, indices, updates) = layouts, node.inputs
    if not isinstance(table, Sharded) or indices.rank is None or updates.rank is None:
        return None
    if updates.rank == 0:
        return None
    if table.axis:
        return Plan([table, WHOLE, table.moved(table.axis - 1 + indices.rank)], [])
    if len(table.blocks) > 1:
        return None

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> tf.Operation:
        handle, numbers, values = inputs
        own, is_mine = own_numbers(emission, table, numbers)
        if node.type == "ResourceScatterUpdate":
            own, values = (tf.boolean_mask(t, is_mine) for t in (own, values))
        else:  # another replica's row: zero is added to row 0
            behind = tf.ones([len(values.shape) - len(is_mine.shape)], tf.int32)
            is_mine = tf.reshape(is_mine, tf.concat([tf.shape(is_mine), behind], 0))
            values = tf.where(is_mine, values, tf.zeros([], values.dtype))
        return tensorflow_names.copy_operation(node.op, [handle, own, values])

    return Plan([table, WHOLE, WHOLE], [], emit)


@rule("ResourceGatherNd", table=HANDLE_RULES)
def look_up_nd(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Take elements of a variable that is cut along an axis that the indices do not name."""
    table, shape_ = layouts[0], node.inputs[1].shape
    width = None if shape_ is None else shape_[-1]
    if not isinstance(table, Sharded) or not isinstance(width, int):
        return None
    if table.axis < width or shape_ is None:
        return None
    return Plan([table, WHOLE], [table.moved(table.axis - width + len(shape_) - 1)])
