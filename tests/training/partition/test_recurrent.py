"""cuDNN's recurrent layers by rows; arithmetic of any device replaces cuDNN's."""

from __future__ import annotations

import importlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.training.partition.emission import Emission
from tests.training.partition.partitioned import Partitioned

ROWS, TIME, WIDTH, UNITS = 5, 4, 3, 2


def forward(x, h, c, params, lengths):
    """Compute each row by itself from all operands; ``reserve`` grows with the rows."""
    seen = tf.sequence_mask(lengths, tf.shape(x)[1], dtype=x.dtype)[..., None]
    output = tf.cumsum(x[..., :UNITS] * seen, 1) + h * tf.reduce_mean(params)
    last = output[:, -1:] + c
    reserve = tf.reshape(tf.reduce_sum(x, [1, 2]) + 1, [-1])
    cell = last * 2 if c.shape.rank else c
    return [output, last, cell, reserve, tf.zeros([1], tf.int8)]


def backward(x, h, c, params, lengths, out, *rest):
    """Compute the gradients in the same way; the weights' one is a sum over the rows."""
    of_out, of_h, of_c, reserve, _ = rest[-5:]
    kept = reserve[:, None, None]
    of_weights = tf.reduce_sum(of_out * kept) + tf.reduce_sum(out * of_h)
    return [
        tf.pad(of_out * kept, [[0, 0], [0, 0], [0, WIDTH - UNITS]]),
        of_h * kept,
        of_c + of_h if c.shape.rank else c,
        tf.ones_like(params) * of_weights,
    ]


STAND_INS = {"CudnnRNNV3": forward, "CudnnRNNBackpropV3": backward}


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have emitted graphs contain ``STAND_INS``; return the list of those in use."""
    copy, made = Emission.copy, []

    def standing_in(self: Any, node: Any, inputs: Any, **attributes: Any) -> Any:
        if node.type not in STAND_INS:
            return copy(self, node, inputs, **attributes)
        made.append(node.type)
        return STAND_INS[node.type](*inputs)

    monkeypatch.setattr(Emission, "copy", standing_in)
    return made


def trained(run: Any) -> Any:
    """Return a function of rows and weights, with outputs and gradients."""

    def function(x, h, c, params, lengths):
        with tf.GradientTape() as tape:
            tape.watch([x, h, c, params])
            output, last, cell, *_ = run(x, h, c, params, lengths)
            loss = tf.reduce_sum(output**2) + tf.reduce_sum(last * cell)
        return [output, last, loss, *tape.gradient(loss, [x, h, c, params])]

    return function


def by_cudnn(x, h, c, params, lengths):
    return tf.raw_ops.CudnnRNNV3(
        input=x,
        input_h=h,
        input_c=c,
        params=params,
        sequence_lengths=lengths,
        rnn_mode="lstm",
        time_major=False,
    )


@tf.custom_gradient
def by_stand_in(x, h, c, params, lengths):
    made = forward(x, h, c, params, lengths)

    def gradient(*of: tf.Tensor) -> list[tf.Tensor]:
        return [
            *backward(x, h, c, params, lengths, *made[:3], *of[:3], *made[3:]),
            None,
        ]

    return made, gradient


@pytest.mark.parametrize("counts", [[2, 3], [5, 0], [0, 1, 4]])
def test_each_replica_runs_its_rows(counts: list[int], cudnn: list[str]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, TIME, WIDTH))
    states = [rng.normal(size=(ROWS, 1, UNITS)) for _ in range(2)]
    lengths = rng.integers(1, TIME + 1, ROWS).astype("int32")
    arguments = [x, *states, rng.normal(size=7), lengths]
    has_rows = [True, True, True, False, True]
    made = Partitioned(trained(by_cudnn), arguments, has_rows, replicas=len(counts))
    assert not made.fallbacks and set(cudnn) == set(STAND_INS)
    assert len(made.traffic.gathers) == 5  # returned values with rows
    wanted = trained(by_stand_in)(*map(tf.constant, arguments))
    for want, got in zip(wanted, made(counts, arguments), strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-12)


@pytest.mark.parametrize("layer", [keras.layers.LSTM, keras.layers.GRU])
def test_layers_of_keras_are_not_gathered(
    layer: Any, cudnn: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test has cases with and without a mask, which uses other operations."""
    rnn = importlib.import_module("keras.src.backend.tensorflow.rnn")
    monkeypatch.setattr(rnn, "_is_gpu_available", lambda: True)
    made = layer(UNITS, return_sequences=True)
    made.build((None, TIME, WIDTH))

    def function(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            mask = tf.ones([tf.shape(x)[0], TIME], tf.bool)
            loss = tf.reduce_sum(made(tf.cast(x, "float32"), mask=mask) ** 2)
            loss += tf.reduce_sum(made(tf.cast(x, "float32")) ** 2)
        return [loss, *tape.gradient(loss, [w.value for w in made.weights])]

    x = np.zeros((ROWS, TIME, WIDTH))
    found = Partitioned(function, [x], [True], replicas=2)
    assert "CudnnRNNBackpropV3" in found.types
    assert not found.fallbacks and not found.traffic.gathers
    assert cudnn.count("CudnnRNNV3") == 2 * 2  # on two replicas
