"""Operations on rows whose output has a length that TensorFlow would know, and we do not.

What follows such an operation is computed whole on every rank, and so may be all that is
behind it: a gradient without a length made the backward pass of an encoder whole. A rule
for a shape takes a name off the list below; nothing may be added to it without a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from collective.training.partition.layouts import ROWS
from collective.training.partition.partition import Partition
from collective.training.partition.plans import Rows
from collective.training.partition.sizes import Size

COUNT = 6


def _n(x: tf.Tensor) -> Any:
    return tf.shape(x)[0]


def _pairs(x: tf.Tensor) -> tf.Tensor:
    return x @ tf.transpose(x)


def _positive(x: tf.Tensor) -> tf.Tensor:
    return _pairs(x) + 9 * tf.eye(_n(x), dtype=x.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    # Slices, and what takes their place.
    "x[None]": lambda x, i, m: x[None],
    "x[:, None]": lambda x, i, m: x[:, None],
    "x[0]": lambda x, i, m: x[0],
    "x[-1]": lambda x, i, m: x[-1],
    "x[1:]": lambda x, i, m: x[1:],
    "x[:-1]": lambda x, i, m: x[:-1],
    "x[::-1]": lambda x, i, m: x[::-1],
    "x[:, 1:]": lambda x, i, m: x[:, 1:],
    "x[::2]": lambda x, i, m: x[::2],
    "x[1::2]": lambda x, i, m: x[1::2],
    "x[::-2]": lambda x, i, m: x[::-2],
    "x[:n // 2]": lambda x, i, m: x[: _n(x) // 2],
    "x[:3]": lambda x, i, m: x[:3],
    "x[-2:]": lambda x, i, m: x[-2:],
    "pairwise": lambda x, i, m: x[:, None] - x[None],
    "split of two views": lambda x, i, m: tf.split(tf.concat([x, x], 0), 2),
    "split": lambda x, i, m: tf.split(x, 2),
    "split of columns": lambda x, i, m: tf.split(x, 2, 1),
    "pad": lambda x, i, m: tf.pad(x, [[1, 1], [0, 0]]),
    "mirrored": lambda x, i, m: tf.pad(x, [[1, 1], [0, 0]], "REFLECT"),
    "frame": lambda x, i, m: tf.signal.frame(x, 2, 1, axis=0),
    # Orders.
    "reverse": lambda x, i, m: tf.reverse(x, [0]),
    "roll": lambda x, i, m: tf.roll(x, 1, 0),
    "cumsum": lambda x, i, m: tf.cumsum(x, 0),
    "cumprod": lambda x, i, m: tf.math.cumprod(x, 1),
    "logcumsumexp": lambda x, i, m: tf.math.cumulative_logsumexp(x, 0),
    "sort": lambda x, i, m: tf.sort(x, 0),
    "argsort": lambda x, i, m: tf.argsort(x, 0),
    "shuffle": lambda x, i, m: tf.random.experimental.stateless_shuffle(x, [1, 2]),
    "nth": lambda x, i, m: tf.raw_ops.NthElement(input=x, n=1),
    "places": lambda x, i, m: tf.math.invert_permutation(tf.argsort(x[:, 0])),
    "unique": lambda x, i, m: tf.unique(i)[1],
    # Matrices of all pairs.
    "eye": lambda x, i, m: tf.eye(_n(x)),
    "eye of two views": lambda x, i, m: tf.eye(2 * _n(x), dtype=x.dtype),
    "set_diag": lambda x, i, m: tf.linalg.set_diag(_pairs(x), x[:, 0]),
    "diag_part": lambda x, i, m: tf.linalg.diag_part(_pairs(x)),
    "band_part": lambda x, i, m: tf.linalg.band_part(_pairs(x), -1, 0),
    "diag": lambda x, i, m: tf.linalg.diag(x[:, 0]),
    "tensor_diag": lambda x, i, m: tf.linalg.tensor_diag(x[:, 0]),
    "tensor_diag_part": lambda x, i, m: tf.linalg.tensor_diag_part(_pairs(x)),
    "trace": lambda x, i, m: tf.linalg.trace(_pairs(x)),
    "solve": lambda x, i, m: tf.linalg.solve(_positive(x), x),
    "cholesky": lambda x, i, m: tf.linalg.cholesky(_positive(x)),
    "inv": lambda x, i, m: tf.linalg.inv(_positive(x)),
    "eigh": lambda x, i, m: tf.linalg.eigh(_positive(x)),
    "other diagonal": lambda x, i, m: tf.linalg.diag_part(_pairs(x), k=1),
    # Look-ups and counts.
    "gather": lambda x, i, m: tf.gather(x, i % _n(x)),
    "scatter": lambda x, i, m: tf.scatter_nd(i[:, None] % _n(x), x, tf.shape(x)),
    "one_hot": lambda x, i, m: tf.one_hot(i, _n(x)),
    "repeat": lambda x, i, m: tf.repeat(x, 2, 0),
    "tile": lambda x, i, m: tf.tile(x, [2, 1]),
    "meshgrid": lambda x, i, m: tf.meshgrid(x[:, 0], x[:, 1]),
    "mask": lambda x, i, m: tf.sequence_mask(i, _n(x)),
    "segments": lambda x, i, m: tf.math.unsorted_segment_sum(x, i, _n(x)),
    "stitch": lambda x, i, m: tf.dynamic_stitch([tf.range(_n(x))], [x]),
    "range": lambda x, i, m: tf.range(0, _n(x), 2),
    "bytes": lambda x, i, m: tf.bitcast(tf.cast(x, "float32"), "uint8"),
    # Images.
    "crop": lambda x, i, m: tf.image.crop_and_resize(
        m, tf.cast(x, "float32"), tf.range(_n(x)), [2, 2]
    ),
    "argmax": lambda x, i, m: tf.nn.max_pool_with_argmax(m, 2, 2, "SAME"),
    "rounded": lambda x, i, m: tf.quantization.quantize_and_dequantize_v2(
        x, -1.0, 1.0, range_given=True
    ),
    "boxes": lambda x, i, m: tf.image.draw_bounding_boxes(
        m, tf.zeros([_n(x), 1, 4]), [[0.0, 0, 1]]
    ),
    "suppressed": lambda x, i, m: tf.image.combined_non_max_suppression(
        tf.zeros([_n(x), 3, 1, 4]), tf.zeros([_n(x), 3, 1]), 2, 2
    ),
    "patches": lambda x, i, m: tf.image.extract_patches(
        m, [1, 2, 2, 1], [1, 2, 2, 1], [1] * 4, "VALID"
    ),
}

#: By the name of a function: the operations of unknown lengths, and why.
UNKNOWN: dict[str, str] = {}


def _traced(function: Callable[..., Any], count: int | None) -> Any:
    """The concrete function of the results and their gradients."""

    def with_gradients(x: tf.Tensor, i: tf.Tensor, m: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([x, m])
            results = tf.nest.flatten(function(tf.sin(x), i, tf.sin(m)))
            scores = [
                tf.cast(tf.reduce_sum(tf.sin(y)), tf.float32)
                for y in results
                if y.dtype.is_floating
            ]
            score = tf.add_n([tf.zeros([]), *scores])
        try:
            slopes = tape.gradient(score, [x, m])
        except LookupError:
            slopes = []
        return [*results, *(tf.convert_to_tensor(g) for g in slopes if g is not None)]

    return tf.function(with_gradients, autograph=False).get_concrete_function(
        tf.TensorSpec([count, 4], tf.float64),
        tf.TensorSpec([count], tf.int32),
        tf.TensorSpec([count, 6, 6, 3], tf.float32),
    )


def _is_own(size: Any, value: Any) -> bool:
    """Whether a size is a symbol of this value itself: not of one before it."""
    return isinstance(size, Size) and any(
        s.origin is not None and s.origin[0] is value for s in size.symbols
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_what_a_length_is_unknown(name: str) -> None:
    """Neither of the operation nor of its gradient, which stock TensorFlow knows."""
    open_, known = (_traced(FUNCTIONS[name], n) for n in (None, COUNT))
    operations = {op.name: op for op in known.graph.get_operations()}
    found = set()
    for node in Partition(open_, [ROWS] * 3, Rows.unknown(COUNT)).graph.nodes:
        same = operations.get(node.op.name)
        if same is None or same.type != node.type or node.op.graph is not open_.graph:
            continue
        for value, tensor in zip(node.outputs, same.outputs, strict=True):
            if value.is_handle or tensor.shape.rank is None:
                continue
            if value.shape is None:
                found.add(node.type)
                continue
            if value.rank != tensor.shape.rank:
                continue  # another one of this name
            sizes = zip(value.shape, tensor.shape.as_list(), strict=True)
            if any(n is not None and _is_own(size, value) for size, n in sizes):
                found.add(node.type)
    assert found == set(UNKNOWN.get(name, "").split())
