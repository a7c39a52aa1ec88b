"""Parts of the emitted graph for GPUs, read from the graph: a GPU is pretended here.

tests/gpu runs such graphs on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.training.partition.partitioned import Partitioned

pytestmark = [
    pytest.mark.usefixtures("pretended_gpu"),
]
ROWS = 6
#: By type of operation: the inputs that its GPU kernel reads from host memory.
ON_HOST = {"Slice": [1, 2], "PadV2": [1]}


def emitted(function: Any, *arguments: np.ndarray) -> Partitioned:
    return Partitioned(
        function, arguments, [True] * len(arguments), replicas=2, is_static=False
    )


def operations(made: Partitioned) -> list[tf.Operation]:
    return made._emitted.graph.get_operations()


def test_sizes_are_computed_on_the_host() -> None:
    """Otherwise each slice waits for the GPU; but no tensor is copied for its shape."""

    def function(x: tf.Tensor) -> list[tf.Tensor]:
        drawn = tf.random.stateless_uniform([tf.shape(x)[0], 3], [1, 2], dtype=x.dtype)
        images = tf.nn.max_pool2d(tf.reshape(x, [-1, 1, 3, 1]), 1, 1, "SAME")
        ragged = tf.boolean_mask(x, x[:, 0] > 0.5)
        whole = tf.range(tf.shape(x)[0])[:, None] * tf.ones([1, 3], tf.int32)
        return [
            x * drawn,
            images,
            x * tf.cast(whole, x.dtype),
            tf.reshape(ragged, [tf.size(ragged)]),
        ]

    x = np.random.default_rng(0).uniform(size=(ROWS, 3))
    made = emitted(function, x)
    read = [
        (op.type, op.inputs[i].op)
        for op in operations(made)
        for i in ON_HOST.get(op.type, ())
        if op.inputs[i].dtype == tf.int64
    ]
    assert {kind for kind, _ in read} == set(ON_HOST)
    for kind, source in read:
        assert source.device.endswith("CPU:0"), f"{kind} of {source.type}"
    for op in operations(made):
        assert op.type not in ("Shape", "ShapeN", "Size") or not op.device, op
    for want, got in zip(made.whole([x]), made([ROWS, 0], [x]), strict=True):
        np.testing.assert_array_equal(got, want)


def test_kernels_that_cannot_do_without_a_row_get_one() -> None:
    """These are cuDNN's kernels, and kernels that would start without a thread."""

    def function(x: tf.Tensor, i: tf.Tensor) -> list[tf.Tensor]:
        pooled = tf.nn.avg_pool3d(x, 2, 2, "SAME")
        flat = tf.cast(tf.reshape(pooled, [-1, 2, 2, 2]), tf.float32)
        normal = tf.nn.local_response_normalization(flat)
        return [normal, tf.math.in_top_k(i, normal[:, 0, 0], 1)]

    rng = np.random.default_rng(0)
    x = rng.uniform(size=(ROWS, 3, 3, 2, 2)).astype(np.float32)
    i = rng.integers(0, 2, ROWS)
    made = emitted(function, x, i)
    for op in operations(made):
        if op.type in ("AvgPool3D", "LRN", "InTopKV2"):
            assert all(t.op.type == "PadV2" for t in op.inputs[:1]), op
    for want, got in zip(made.whole([x, i]), made([0, ROWS], [x, i]), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("counts", [[ROWS, 0], [0, ROWS]])
def test_convolutions_in_float32_of_no_row(counts: list[int]) -> None:
    """oneDNN fuses a Pad and a convolution without padding."""

    def function(x: tf.Tensor) -> list[tf.Tensor]:
        kernel = tf.ones([2, 2, 3, 2])
        plain = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "VALID"))
        return [plain, tf.nn.convolution(x, kernel, 1, "SAME", dilations=[2, 3])]

    x = np.random.default_rng(0).normal(size=(ROWS, 4, 6, 3)).astype("float32")
    made = emitted(function, x)
    for want, got in zip(made.whole([x]), made(counts, [x]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
