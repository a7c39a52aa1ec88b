"""Lists of tensors in another layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.partition.layouts import (
    Layout,
    Listed,
    Sharded,
    is_whole,
    lie_alike,
)
from collective.training.partition.shares import sliced

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission


def list_as(
    emission: Emission, tensors: list[tf.Tensor], have: Listed, layout: Layout
) -> list[tf.Tensor]:
    """Convert a list to one whose elements lie otherwise (see ``is_convertible``)."""
    if is_whole(layout) or lie_alike(have, layout):
        return tensors
    assert isinstance(layout, Listed)
    if have.element is None:
        return tensors * len(emission.share.own)
    assert have.shape is not None
    element = layout.element
    if not isinstance(element, Sharded):
        whole, none = tensors[0], tf.zeros_like(tensors[0])
        return [
            tf.cond(emission.share.is_lead[i], lambda: whole, lambda: none)
            for i in range(len(emission.share.own))
        ]
    if have.is_optional:
        return [_share_of(emission, tensors[0], have, element) for _ in emission.each()]
    sizes = [size for size in have.shape if size is not None]
    assert len(sizes) == len(have.shape), have
    stacked = tf.raw_ops.TensorListStack(
        input_handle=tensors[0],
        element_shape=emission.vector(sizes, tf.int32),
        element_dtype=layout.dtype,
    )
    stacked.set_shape([None] * (1 + len(have.shape)))
    parts = []
    for _ in emission.each():
        part = sliced(emission, stacked, element.moved(element.axis + 1))
        parts.append(
            tf.raw_ops.TensorListFromTensor(
                tensor=part, element_shape=tf.shape(part)[1:]
            )
        )
    return parts


def _share_of(
    emission: Emission, optional: tf.Tensor, have: Listed, element: Sharded
) -> tf.Tensor:
    """Return a replica's part of what a branch has left for its gradient, if it was taken."""

    def part() -> tf.Tensor:
        (whole,) = tf.raw_ops.OptionalGetValue(
            optional=optional,
            output_types=[have.dtype],
            output_shapes=[tf.TensorShape([None] * len(have.shape or ()))],
        )
        own = sliced(emission, whole, element)
        return tf.raw_ops.OptionalFromValue(components=[own])

    return tf.cond(
        tf.raw_ops.OptionalHasValue(optional=optional), part, tf.raw_ops.OptionalNone
    )
