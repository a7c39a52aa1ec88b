"""Lists of tensors in another layout."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.training.partition.layouts import WHOLE, Layout, Listed, Sharded
from collective.training.partition.propagation import is_whole
from collective.training.partition.shares import sliced


def list_as(
    emission: Any, tensors: list[tf.Tensor], have: Listed, layout: Layout
) -> list[tf.Tensor]:
    """A list whose elements lie otherwise; rules ask for no list of shares whole."""
    if layout == WHOLE and is_whole(have):
        return tensors
    assert isinstance(layout, Listed)
    if have.element == layout.element or is_whole(layout):
        assert is_whole(have) or have.element == layout.element, (have, layout)
        return tensors
    if have.element is None:
        return tensors * len(emission.share.own)
    assert have.element == WHOLE and have.shape is not None, (have, layout)
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
