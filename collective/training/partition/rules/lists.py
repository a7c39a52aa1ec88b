"""Lists of tensors: all elements of a list lie alike."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

import tensorflow as tf

from collective.training.keras_compat import tensorflow_names
from collective.training.partition.graph import Node, Value, sizes_in
from collective.training.partition.layouts import (
    WHOLE,
    Layout,
    Listed,
    OpenShape,
    Partial,
    Shape,
    Sharded,
)
from collective.training.partition.plans import Plan, Rows, rule, summed, whole
from collective.training.partition.sizes import AnySize, Size

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission

EMPTY = Listed()


def _any_shape(node: Node, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return operands whose first, the shape of elements, is left open: shares differ."""
    return [tf.constant(-1, node.inputs[0].dtype), *inputs[1:]]


@rule("EmptyTensorList", "TensorListReserve")
def empty(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Lay a list without elements out as what is put into it."""

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return list(emission.copy(node, _any_shape(node, inputs)))

    return Plan([WHOLE] * len(layouts), [EMPTY], emit)


def _filled(have: Layout, value: Value, layout: Layout, rows: Rows) -> Listed:
    """Return the layout of a list into which a value was put.

    Elements are shares, sums or whole: a partial value of another kind is made whole.
    """
    if rows.whole_lists or (isinstance(layout, Partial) and layout.kind != "sum"):
        layout = WHOLE
    sizes = sizes_in(value)
    flat = sizes if isinstance(sizes, tuple) else (sizes,)
    if not all(isinstance(size, int) or _is_rows(size, rows) for size in flat):
        sizes = None  # which may be others in the next round of a loop
    added = Listed(layout, _lasting(value.shape), value.dtype, sizes)
    if isinstance(have, Listed) and have.element is not None:
        return have.met(added)
    return added


def _lasting(shape: Shape) -> OpenShape:
    """Return the sizes that all elements of a list have, known where it is read."""
    if shape is None:
        return None
    return tuple(s if isinstance(s, int) or s.is_lasting else None for s in shape)


def _with_item(
    node: Node, layouts: list[Layout], place: int, rows: Rows
) -> Plan | None:
    have = layouts[0]
    if not isinstance(have, Listed):
        return whole(node)  # a list of which nothing is known
    made = _filled(have, node.inputs[place], layouts[place], rows)
    wanted: list[Layout] = [have, *[WHOLE] * (len(layouts) - 1)]
    wanted[place] = made.element or WHOLE
    return Plan(wanted, [made])


@rule("TensorListPushBack")
def push(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Append an element."""
    return _with_item(node, layouts, 1, rows)


@rule("TensorListSetItem")
def set_item(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Replace an element."""
    return _with_item(node, layouts, 2, rows)


def _learn_shape(value: Value, shape: OpenShape) -> None:
    known = value.static_shape()
    if shape is None or (known is not None and len(known) != len(shape)):
        return
    value.shape = tuple(
        old if isinstance(old, int) else value.symbol(axis) if size is None else size
        for axis, (old, size) in enumerate(
            zip(known or [None] * len(shape), shape, strict=True)
        )
    )


def _item_shape(
    emission: Emission, node: Node, have: Listed, place: int, inputs: list[tf.Tensor]
) -> Any:
    """Return the shape of an element, which makes zeros of one that was not set."""
    x = list(inputs)
    dtype = node.inputs[place].dtype
    if have.shape is not None and not isinstance(have.element, Sharded):
        if all(isinstance(size, int) for size in have.shape):
            x[place] = tf.constant(have.shape, dtype, [len(have.shape)])
        return x
    if have.shape is None or not isinstance(have.element, Sharded):
        return x
    parts = [
        emission.local_size(have.element)
        if axis == have.element.axis
        else emission.number(size)
        if isinstance(size, int)
        else None
        for axis, size in enumerate(have.shape)
    ]
    if any(part is None for part in parts):
        x[place] = tf.constant(-1, dtype)
    else:
        x[place] = tf.cast(tf.stack(parts), dtype)
    return x


def _reads(node: Node, layouts: list[Layout], at: int, more: int) -> Plan | None:
    """Return an element of a list, whose shape is operand ``at``."""
    have = layouts[0]
    if not isinstance(have, Listed):
        return None
    element = have.element or WHOLE
    item = node.outputs[-1]
    _learn_shape(item, have.shape)
    item.sizes = have.sizes

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return list(emission.copy(node, _item_shape(emission, node, have, at, inputs)))

    rest = [WHOLE] * (len(layouts) - 1)
    return Plan([have, *rest], [*([have] * more), element], emit)


@rule("TensorListPopBack")
def pop(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Take the last element, and leave the list without it."""
    return _reads(node, layouts, 1, 1)


@rule("TensorListGetItem")
def get_item(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Read an element."""
    return _reads(node, layouts, 2, 0)


@rule("TensorListStack")
def stack(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Stack all elements along a new first axis."""
    have = layouts[0]
    if not isinstance(have, Listed):
        return None
    element, out = have.element or WHOLE, node.outputs[0]
    if have.shape is not None:
        count = node.attr("num_elements")
        first = count if count >= 0 else out.symbol(0)
        _learn_shape(out, (first, *have.shape))
    made = element.moved(element.axis + 1) if isinstance(element, Sharded) else element

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return list(emission.copy(node, _item_shape(emission, node, have, 1, inputs)))

    return Plan([have, WHOLE], [made], emit)


@rule("TensorListGather")
def gather(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Stack some elements along a new first axis."""
    have = layouts[0]
    if not isinstance(have, Listed) or layouts[1] != WHOLE:
        return None
    element, out = have.element or WHOLE, node.outputs[0]
    if have.shape is not None and node.inputs[1].shape is not None:
        _learn_shape(out, (node.inputs[1].shape[0], *have.shape))
    made = element.moved(element.axis + 1) if isinstance(element, Sharded) else element

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return list(emission.copy(node, _item_shape(emission, node, have, 2, inputs)))

    return Plan([have, WHOLE, WHOLE], [made], emit)


@rule("TensorListScatter", "TensorListScatterV2")
def scatter(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Make elements of the places of the first axis, in another order."""
    layouts = summed(layouts)
    if node.inputs[0].shape is None or layouts[1] != WHOLE:
        return None
    return _of_places(node, layouts, rows, 2)


def _of_places(node: Node, layouts: list[Layout], rows: Rows, at: int) -> Plan:
    """Return the places of the first axis as elements, whose shape is operand ``at``."""
    x = node.inputs[0]
    element: Layout = WHOLE
    if isinstance(layouts[0], Sharded) and layouts[0].axis and not rows.whole_lists:
        element = layouts[0].moved(layouts[0].axis - 1)
    taken = WHOLE if element == WHOLE else layouts[0]
    assert x.shape is not None

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        shape = tf.shape(inputs[0], node.inputs[at].dtype)[1:]
        return list(emission.copy(node, [*inputs[:at], shape, *inputs[at + 1 :]]))

    rest = [WHOLE] * (len(layouts) - 1)
    made = Listed(element, _lasting(x.shape[1:]), x.dtype)
    return Plan([taken, *rest], [made], emit)


@rule("TensorListFromTensor")
def from_tensor(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Make elements of the places of the first axis."""
    x = node.inputs[0]
    if x.shape is None:
        return Plan([WHOLE, WHOLE], [Listed(WHOLE, None, x.dtype)])
    return _of_places(node, summed(layouts), rows, 1)


@rule("TensorListLength")
def length(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Return the length, which is the same for every part."""
    return Plan(layouts, [WHOLE])


@rule("TensorListResize")
def resize(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Change the number of elements."""
    return Plan([layouts[0], WHOLE], [layouts[0]])


@rule("TensorListElementShape")
def element_shape(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Return the whole shape of the elements."""
    have = layouts[0]
    if not isinstance(have, Listed) or have.shape is None:
        return whole(node)
    sizes = have.shape

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        dtype = node.outputs[0].dtype
        parts = [
            emission.number(size)
            if isinstance(size, int) or _is_rows(size, rows)
            else tf.constant(-1, tf.int64)
            for size in sizes
        ]
        return [tf.cast(tf.stack(parts), dtype) if parts else tf.zeros([0], dtype)]

    return Plan([None], [WHOLE], emit)


def _is_rows(size: AnySize | None, rows: Rows) -> TypeGuard[AnySize]:
    """Return whether a size is known in every graph of the step."""
    return isinstance(size, Size) and size.symbols <= rows.lasting


@rule("OptionalNone")
def no_value(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Make what a branch that is not taken leaves for its gradient."""
    return Plan([], [Listed(is_optional=True)])


@rule("OptionalFromValue")
def optional(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Make what a branch leaves for its gradient: like a list of one element."""
    if len(layouts) != 1:
        return whole(node)
    made = _filled(EMPTY, node.inputs[0], layouts[0], rows)
    return Plan([made.element or WHOLE], [replace(made, is_optional=True)])


@rule("OptionalGetValue")
def from_optional(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Take out what is in it; the shapes that are expected are those of the whole."""
    have = layouts[0]
    if not isinstance(have, Listed) or len(node.outputs) != 1:
        return None
    (value,) = node.outputs
    _learn_shape(value, have.shape)
    value.sizes = have.sizes
    open_ = tensorflow_names.one_open_shape()

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return list(emission.copy(node, inputs, output_shapes=open_))

    return Plan([have], [have.element or WHOLE], emit)


@rule("OptionalHasValue")
def has_value(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Return a result that is the same on every replica."""
    return Plan(layouts, [WHOLE])
