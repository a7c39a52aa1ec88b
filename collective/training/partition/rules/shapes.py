"""Operations that change or ask for a shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from collective.training.partition.graph import Node, Sizes, Value, sizes_in
from collective.training.partition.known import on_host
from collective.training.partition.layouts import (
    MOMENTS,
    MOST_BLOCKS,
    SUM,
    WHOLE,
    Layout,
    Partial,
    Sharded,
    is_whole,
    reshaped,
)
from collective.training.partition.plans import Plan, Rows, rule, summed, whole
from collective.training.partition.rules.empty import with_a_row
from collective.training.partition.sizes import quotient
from collective.training.partition.values import axis_in, squeezed

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission


@rule("Reshape", "ExpandDims", "Squeeze")
def reshape(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Keep the elements and their order."""
    x, out, layout = node.inputs[0], node.outputs[0], layouts[0]
    if layout == SUM and all(lay == WHOLE for lay in layouts[1:]):
        return Plan(layouts, [SUM])
    layout = summed(layouts)[0]
    if not isinstance(layout, Sharded):
        return whole(node) if all(lay == WHOLE for lay in summed(layouts)) else None
    if x.shape is None or out.shape is None:
        return None
    made = reshaped(x.shape, layout, out.shape, rows.rows)
    if made is None:
        return None
    if node.type == "Squeeze":
        return _squeeze(node, layout, made)
    if node.type == "ExpandDims":
        return Plan([layout, WHOLE], [made])
    sizes = out.shape

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        target = _target(emission, inputs, sizes, made)
        return [tf.reshape(inputs[0], target)]

    return Plan([layout, WHOLE], [made], emit)


def _squeeze(node: Node, layout: Sharded, made: Sharded) -> Plan | None:
    """Take away the axes of size 1 of the whole tensor.

    A replica's part may have one row, or none, where the whole tensor has more, or one.
    """
    sizes, gone = node.outputs[0].shape, squeezed(node)
    if gone is None or sizes is None:
        return None
    kept = [axis for axis in range(len(sizes) + len(gone)) if axis not in gone]

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        if layout.axis not in gone:
            return [tf.squeeze(inputs[0], gone) if gone else tf.identity(inputs[0])]
        given = tf.gather(tf.shape(inputs[0], tf.int64), kept)
        return [tf.reshape(inputs[0], _target(emission, [*inputs, given], sizes, made))]

    return Plan([layout], [made], emit)


def _target(
    emission: Emission, inputs: list[tf.Tensor], sizes: Sizes, made: Sharded
) -> tf.Tensor:
    """Return the shape of a replica's part."""
    given = inputs[1]
    local = list(sizes)
    local[made.axis] = emission.own_rows * made.per_row
    if emission.knows(local):
        return emission.vector(local, given.dtype)
    parts = [
        tf.constant(size, given.dtype) if isinstance(size, int) else given[axis]
        for axis, size in enumerate(sizes)
    ]
    parts[made.axis] = tf.cast(emission.local_size(made), given.dtype)
    return tf.stack(parts)


@rule("Transpose", "ConjugateTranspose")
def transpose(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Move the sharded axis."""
    order = node.inputs[1].const
    if layouts[0] == SUM and layouts[1] == WHOLE:
        return Plan(layouts, [SUM])
    layout = summed(layouts)[0]
    if not isinstance(layout, Sharded):
        return whole(node)
    if order is None:
        return None
    return Plan(
        [layout, WHOLE], [layout.moved([int(i) for i in order].index(layout.axis))]
    )


@rule("BroadcastTo")
def broadcast_to(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Keep rows as rows; what is whole is made larger on each replica for itself."""
    layout, x, out = summed(layouts)[0], node.inputs[0], node.outputs[0]
    if out.shape is None or x.shape is None:
        return None if isinstance(layout, Sharded) else whole(node)
    ahead = len(out.shape) - len(x.shape)
    if isinstance(layout, Sharded):
        made = layout.moved(layout.axis + ahead)
        if out.shape[made.axis] != layout.per_row * rows.rows:
            return None

        def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
            local = emission.local_shape(inputs[1], made, out.shape)
            return [tf.broadcast_to(inputs[0], local)]

        return Plan([layout, WHOLE], [made], emit)

    def share(emission: Emission, wanted: Sharded) -> tf.Tensor | None:
        axis = wanted.axis - ahead
        assert x.shape is not None
        if axis >= 0 and x.shape[axis] != 1:
            return None
        small, sizes = (emission.whole_of(value) for value in node.inputs)
        return tf.broadcast_to(small, emission.local_shape(sizes, wanted, out.shape))

    return Plan([WHOLE, WHOLE], [WHOLE], share=share)


@rule("Fill")
def fill(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Fill what each replica uses."""

    def share(emission: Emission, wanted: Sharded) -> tf.Tensor | None:
        sizes, number = (emission.whole_of(value) for value in node.inputs)
        shape = node.outputs[0].shape
        return tf.fill(emission.local_shape(sizes, wanted, shape), number)

    return Plan([WHOLE, WHOLE], [WHOLE], share=share)


@rule("Tile")
def tile(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Repeat the rows, one block after the other."""
    layout, times = summed(layouts)[0], sizes_in(node.inputs[1])
    if not isinstance(layout, Sharded):
        return whole(node)
    if not isinstance(times, tuple):
        return None
    count = times[layout.axis]
    if not isinstance(count, int) or not 0 < count * len(layout.blocks) <= MOST_BLOCKS:
        return None
    return Plan([layout, WHOLE], [Sharded(layout.axis, layout.blocks * count)])


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def pad(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Pad each row, or by as many places as further blocks have."""
    layouts, pads = summed(layouts), sizes_in(node.inputs[1])
    layout = layouts[0]
    if not isinstance(layout, Sharded):
        return whole(node) if all(lay == WHOLE for lay in layouts) else None
    if not isinstance(pads, tuple):
        return None
    wanted: list[Layout] = [layout, *[WHOLE] * (len(layouts) - 1)]
    if pads[layout.axis] == (0, 0):
        plan = Plan(wanted, [layout])
        return with_a_row(plan, node) if node.type.startswith("Mirror") else plan
    ahead, behind = (quotient(size, rows.rows) for size in pads[layout.axis])
    if node.type.startswith("Mirror") or ahead is None or behind is None:
        return None
    blocks = [k for k in (ahead, *layout.blocks, behind) if k]
    axis = layout.axis

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        values, given, *rest = inputs
        around = [emission.own_rows * k for k in (ahead, behind)]
        own = emission.vector(around, given.dtype)
        local = tf.concat([given[:axis], own[None], given[axis + 1 :]], 0)
        return emission.copy(node, [values, local, *rest])

    return Plan(wanted, [Sharded(axis, tuple(blocks))], emit)


@rule("ConcatV2")
def concat(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Concatenate along the rows: the blocks of one follow those of the other."""
    values, axis = node.inputs[:-1], axis_in(node.inputs[-1], node.outputs[0].rank)
    parts = layouts[:-1]
    if axis is None:
        return whole(node) if all(map(is_whole, summed(layouts))) else None
    if SUM in parts and all(lay in (WHOLE, SUM) for lay in parts):
        return Plan([*[SUM] * len(parts), WHOLE], [SUM])
    parts = summed(parts)
    found = [lay for lay in parts if isinstance(lay, Sharded)]
    if not found:
        return whole(node)
    if found[0].axis != axis:
        return Plan([*[found[0]] * len(parts), WHOLE], [found[0]])
    wanted: list[Layout] = []
    blocks: list[Any] = []
    for value, have in zip(values, parts, strict=True):
        if isinstance(have, Sharded) and have.axis == axis:
            wanted.append(have)
            blocks += have.blocks
            continue
        per_row = None
        if value.shape is not None:
            per_row = quotient(value.shape[axis], rows.rows)
        if not per_row:
            return None
        wanted.append(Sharded(axis, (per_row,)))
        blocks.append(per_row)
    if len(blocks) > MOST_BLOCKS:
        return None
    return Plan([*wanted, WHOLE], [Sharded(axis, tuple(blocks))])


@rule("Pack")
def pack(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Stack along a new axis."""
    rank = node.outputs[0].rank
    if SUM in layouts and all(lay in (WHOLE, SUM) for lay in layouts):
        return Plan([SUM] * len(layouts), [SUM])
    layouts = summed(layouts)
    layout = next((lay for lay in layouts if isinstance(lay, Sharded)), None)
    if layout is None:
        return whole(node)
    if rank is None:
        return None
    axis = node.attr("axis") % rank
    return Plan(
        [layout] * len(layouts), [layout.moved(layout.axis + (layout.axis >= axis))]
    )


@rule("Unpack")
def unpack(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Take apart along an axis that goes."""
    (layout,), rank = summed(layouts), node.inputs[0].rank
    if not isinstance(layout, Sharded):
        return whole(node)
    if rank is None:
        return None
    axis = node.attr("axis") % rank
    if axis == layout.axis:
        return None
    made = layout.moved(layout.axis - (layout.axis > axis))
    return Plan([layout], [made] * len(node.outputs))


def _as_it_is(value: Value) -> Layout:
    """Return the layout in which only the shape of a value is read, also of what is partial."""
    return WHOLE if value.layout == MOMENTS else value.layout


@rule("Shape", "ShapeN")
def shape(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Return the whole shape of a value of which each replica has a part."""
    if any(v.rank is None and isinstance(v.layout, Sharded) for v in node.inputs):
        return None

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        results = []
        for value, tensor in zip(node.inputs, inputs, strict=True):
            dtype = node.outputs[0].dtype
            if value.shape is not None and emission.knows(value.shape):
                results.append(emission.vector(value.shape, dtype))
                continue
            sizes = tf.shape(tensor, dtype)
            if isinstance(value.layout, Sharded):
                axis = value.layout.axis
                size = emission.scalar(value.layout.per_row * rows.rows, dtype)
                with on_host():
                    sizes = tf.concat([sizes[:axis], size[None], sizes[axis + 1 :]], 0)
            results.append(sizes)
        return results

    layouts = [_as_it_is(value) for value in node.inputs]
    return Plan(layouts, [WHOLE] * len(node.outputs), emit)


@rule("Size")
def size(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Return the number of elements of the whole."""
    (value,) = node.inputs
    if not isinstance(value.layout, Sharded):
        return Plan([_as_it_is(value)], [WHOLE])

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        layout = value.layout
        assert isinstance(layout, Sharded)
        sizes = tf.shape(inputs[0], tf.int64)
        count = emission.number(layout.per_row * rows.rows)
        axis = layout.axis
        with on_host():
            wholes = tf.concat([sizes[:axis], count[None], sizes[axis + 1 :]], 0)
            return [tf.cast(tf.reduce_prod(wholes), node.outputs[0].dtype)]

    return Plan([value.layout], [WHOLE], emit)


@rule("Rank")
def rank_of(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Return the rank, which is the same for every part."""
    return Plan([_as_it_is(value) for value in node.inputs], [WHOLE])


@rule("Range", "LinSpace")
def range_of(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Count on each replica by itself."""
    if any(isinstance(lay, Partial) for lay in layouts):
        layouts = summed(layouts)
    return whole(node)
