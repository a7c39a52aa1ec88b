"""A rank's part of a variable that is cut along an axis of a mesh, and parts joined again."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from collective.training.partition.layouts import Sharded


def part_of(whole: tf.Tensor, layout: Sharded, place: int, size: int) -> tf.Tensor:
    """Return the part of the rank at ``place`` of ``size`` along an axis of the mesh."""
    found, begin = [], 0
    for block in layout.blocks:
        assert isinstance(block, int)
        starts = [0] * whole.shape.rank
        sizes = whole.shape.as_list()
        starts[layout.axis], sizes[layout.axis] = begin + place * block, block
        found.append(tf.slice(whole, starts, sizes))
        begin += size * block
    return found[0] if len(found) == 1 else tf.concat(found, layout.axis)


def joined(parts: Sequence[tf.Tensor], layout: Sharded) -> tf.Tensor:
    """Return the variable of which these are the parts, in the order of the ranks."""
    if len(layout.blocks) == 1:
        return tf.concat(parts, layout.axis)
    split = [tf.split(part, layout.blocks, layout.axis) for part in parts]
    by_block = [part[block] for block in range(len(layout.blocks)) for part in split]
    return tf.concat(by_block, layout.axis)


def shape_of_part(shape: Sequence[int], layout: Sharded) -> tuple[int, ...]:
    """Return the shape of each rank's part."""
    own = layout.per_row
    assert isinstance(own, int)
    return (*shape[: layout.axis], own, *shape[layout.axis + 1 :])
