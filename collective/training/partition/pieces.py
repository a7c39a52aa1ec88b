"""The pieces of tensors that are ``Owned``: cut out, joined, and summed.

Each rank has consecutive elements of the flat tensor, as many as the others or one more
or less. Tensors here have static shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from collective.training.input.plan import share

# Elements: a tensor of so many travels alone. It then needs no copy, and is not in
# memory twice together with others.
LARGE = 1 << 16


def lengths(shape: Sequence[Any], parts: int) -> list[int]:
    """Return how many elements each rank has of a tensor."""
    bounds = [share(math.prod(shape), part, parts) for part in range(parts)]
    return [stop - start for start, stop in bounds]


def cut(tensor: tf.Tensor, part: int, parts: int) -> tf.Tensor:
    """Return a rank's piece of a whole tensor."""
    tensor = tf.convert_to_tensor(tensor)
    start, stop = share(tensor.shape.num_elements(), part, parts)
    return tf.reshape(tensor, [-1])[start:stop]


def groups(tensors: Sequence[tf.Tensor], elements: Sequence[int]) -> list[list[int]]:
    """Return which of some tensors travel together, by places: small ones of a dtype, last.

    Args:
        elements: How many each tensor has, as it is whole: the same on every rank.
    """
    large: list[list[int]] = []
    small: dict[Any, list[int]] = {}
    for place, (tensor, count) in enumerate(zip(tensors, elements, strict=True)):
        if count >= LARGE:
            large.append([place])
        else:
            small.setdefault(tensor.dtype, []).append(place)
    return [*large, *small.values()]


def joined(gathered: tf.Tensor, shapes: Sequence[Any], parts: int) -> list[tf.Tensor]:
    """Return the whole tensors, of which all ranks sent their pieces one after the other.

    Args:
        gathered: What rank 0 has sent, then what rank 1 has, ...
        shapes: Of the tensors.
    """
    if len(shapes) == 1:
        return [tf.reshape(gathered, shapes[0])]
    sizes = [lengths(shape, parts) for shape in shapes]
    of_rank = [size[part] for part in range(parts) for size in sizes]
    split = tf.split(gathered, of_rank)
    return [
        tf.reshape(tf.concat(split[place :: len(shapes)], 0), shape)
        for place, shape in enumerate(shapes)
    ]


def as_rows(tensor: tf.Tensor, parts: int) -> tf.Tensor:
    """Return the pieces of all ranks below one another; the shorter ones end in a zero."""
    sizes = lengths(tensor.shape, parts)
    flat = tf.reshape(tensor, [-1])
    if len(set(sizes)) == 1:
        return tf.reshape(flat, [parts, sizes[0]])
    pieces = tf.split(flat, sizes)
    longest = max(sizes)
    padded = [
        tf.pad(piece, [[0, longest - size]])
        for piece, size in zip(pieces, sizes, strict=True)
    ]
    return tf.stack(padded)
