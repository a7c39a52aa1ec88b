"""Buckets: the gradients that are summed together, while others are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# The default between hosts (benchmarks/buckets.py). On one host the ranks compute on the
# cores that would sum meanwhile, so there it is all in one.
BYTES_BETWEEN_HOSTS = 4 << 20


def in_buckets(tensors: Sequence[Any], bytes_each: int | None) -> list[list[int]]:
    """Places of the tensors, bucket by bucket, the last tensors first.

    So the buckets are in the order in which back-propagation makes gradients.

    Args:
        tensors: Of TensorFlow, gradients in the order of the layers.
        bytes_each: A bucket is closed once it has so many bytes; None: never.
    """
    places = list(range(len(tensors)))
    if bytes_each is None:
        return [places]
    buckets: list[list[int]] = [[]]
    filled = 0
    for place in reversed(places):
        if filled >= bytes_each:
            buckets.append([])
            filled = 0
        buckets[-1].append(place)
        count = tensors[place].shape.num_elements() or 0
        filled += count * tensors[place].dtype.size
    return buckets
