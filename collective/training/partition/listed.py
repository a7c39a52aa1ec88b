"""Lists of tensors in another layout."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.training.partition.layouts import (
    Layout,
    Listed,
    Sharded,
    is_whole,
    lie_alike,
)
from collective.training.partition.shares import sliced


def list_as(
    emission: Any, tensors: list[tf.Tensor], have: Listed, layout: Layout
) -> list[tf.Tensor]:
    """Converts a list to one whose elements lie otherwise (see ``is_convertible``)."""
    if is_whole(layout) or lie_alike(have, layout):
        return tensors
    assert isinstance(layout, Listed)
    if have.element is None:
        return tensors * len(emission.share.own)
    assert have.shape is not None
    if not isinstance(layout.element, Sharded):
        whole, none = tensors[0], tf.zeros_like(tensors[0])
        return [
            tf.cond(emission.share.is_lead[i], lambda: whole, lambda: none)
            for i in range(len(emission.share.own))
        ]
    stacked = tf.raw_ops.TensorListStack(
        input_handle=tensors[0],
        element_shape=emission.vector(have.shape, tf.int32),
        element_dtype=layout.dtype,
    )
    stacked.set_shape([None] * (1 + len(have.shape)))
    parts = []
    for _ in emission.each():
        part = sliced(emission, stacked, layout.element.moved(layout.element.axis + 1))
        parts.append(
            tf.raw_ops.TensorListFromTensor(
                tensor=part, element_shape=tf.shape(part)[1:]
            )
        )
    return parts
